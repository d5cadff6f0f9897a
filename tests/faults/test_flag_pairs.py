"""Every pair of parallel, memory and data flags trains as it should or is refused in one line.

A run on two ranks is compared with one that has the flags of the pair that change the function, and
no others. ``--fault-seed`` chooses the pairs of the ordinary set.
"""

import itertools
import random
import traceback
from collections import Counter
from pathlib import Path

import pytest

import pretrain_gpt
from megatron_untied.cli.flags import FLAGS
from megatron_untied.training.initialize import UserError
from megatron_untied.training.metrics import read_metrics
from tests.support.chats import CHATS, write_chats, write_tokenizer
from tests.support.corpus import random_documents, write_token_files
from tests.support.pairs import Case
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import train

GROUPS = ("parallelism", "memory and precision", "data")
RANKS, VOCAB = 2, 250
TENSOR, CONTEXT = {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}
STREAMED = {"recompute_granularity": "selective"}
OFFLOADED = STREAMED | {"cpu_offloading_num_layers": "all"}
HIERARCHY = CONTEXT | {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": "2 1"}
FULL = {"use_torch_fsdp2": True}
FILES = {"mock_data": None, "data_path": "DOCUMENTS", "data_cache_path": "CACHE"}
POSITIONS = FILES | {"reset_position_ids": True}
SFT = {
    "sft": True, "mock_data": None, "data_path": "CHATS", "vocab_size": None,
    "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "TOKENIZER",
    "data_cache_path": "CACHE", "long_samples": "truncate",
}  # fmt: skip
OPTIONS: tuple[tuple[Case, Case], ...] = (
    (TENSOR, {}),
    ({"tensor_model_parallel_size": 3}, {}),
    ({"sequence_parallel": True}, TENSOR),
    (CONTEXT, {}),
    ({"cp_comm_type": "p2p"}, CONTEXT),
    ({"cp_comm_type": "a2a+p2p"}, HIERARCHY),
    ({"hierarchical_context_parallel_sizes": "1 2"}, HIERARCHY),
    ({"cp_heads_per_chunk": 2}, CONTEXT),
    ({"cp_heads_per_chunk": "auto"}, CONTEXT),
    ({"cp_overlap": True}, CONTEXT),
    ({"no_cp_overlap": True}, CONTEXT),
    ({"use_distributed_optimizer": True}, {}),
    (FULL, {}),
    ({"distributed_backend": "gloo"}, {}),
    ({"distributed_backend": "nccl"}, {}),
    ({"distributed_timeout_minutes": 5}, {}),
    ({"enable_ft_package": True}, {}),
    ({"optimizer_cpu_offload": True}, FULL),
    ({"bf16": True}, {}),
    ({"loss_chunk_size": 13}, {}),
    (STREAMED, {}),
    ({"recompute_granularity": "full"}, {}),
    ({"recompute_granularity": "auto"}, {}),
    ({"attention_output_layers": 1}, STREAMED),
    ({"recompute_method": "uniform"}, STREAMED),
    ({"recompute_num_layers": 2}, STREAMED | {"recompute_method": "uniform"}),
    ({"sequence_tile_size": 7}, STREAMED),
    ({"cpu_offloading_num_layers": 1}, STREAMED),
    ({"cpu_offloading_num_layers": "all"}, STREAMED),
    ({"activation_disk": "DISK"}, OFFLOADED),
    ({"activation_disk_gib": 2.5e-5}, OFFLOADED | {"activation_disk": "DISK"}),
    ({"no_activation_disk_checksums": True}, OFFLOADED | {"activation_disk": "DISK"}),
    ({"park_during_attention": True}, STREAMED),
    ({"transformer_impl": "inference_optimized"}, {}),
    ({"attention_backend": "local"}, {}),
    ({"attention_backend": "flash"}, {}),
    (
        {"tokenizer_type": "HuggingFaceTokenizer"},
        {"tokenizer_model": "TOKENIZER", "vocab_size": None},
    ),
    ({"tokenizer_model": "TOKENIZER"}, {}),
    ({"vocab_size": VOCAB - 1}, {}),
    ({"data_path": "DOCUMENTS"}, FILES),
    ({"split": "8,1,1"}, FILES),
    ({"data_cache_path": "CACHE"}, FILES),
    ({"long_document_weight": "0:0.5,20:3"}, FILES),
    ({"mock_data": None}, {}),
    ({"num_workers": 1}, {}),
    ({"reset_position_ids": True}, FILES),
    ({"dataloader_inter_document_masking": True}, POSITIONS),
    ({"document_boundaries": "eod"}, POSITIONS),
    ({"eod_mask_loss": True}, FILES),
    (SFT, {}),
    ({"loss_on": "all"}, SFT),
    ({"long_samples": "drop"}, SFT),
    ({"loss_weighting": "sample"}, SFT),
    # Of other groups, with which these work together.
    ({"window_size": "9,0"}, {}),
    ({"micro_batch_size": 2}, {}),
    ({"seq_length_schedule": "0:32,1:64"}, {"seq_length": None, "eval_iters": 0}),
    ({"verify_recompute": 1}, STREAMED),
    ({"lora_rank": 3}, STREAMED),
)  # fmt: skip
"""The flags of each option, and those without which they have no effect."""
CHANGES_FUNCTION = {
    *("tokenizer_type", "tokenizer_model", "vocab_size", "data_path", "data_cache_path", "split"),
    *("long_document_weight", "mock_data", "reset_position_ids", "document_boundaries", "sft"),
    *("dataloader_inter_document_masking", "eod_mask_loss", "loss_on", "long_samples"),
    *("loss_weighting", "window_size", "seq_length_schedule", "seq_length", "lora_rank"),
}


def pairs() -> list[Case]:
    """Flags of every pair of options of two flags: alone, and with what each of them needs."""
    found = []
    for (own, needs), (other, others) in itertools.combinations(OPTIONS, 2):
        if not own.keys() & other.keys():
            alone, whole = own | other, {**needs, **others, **own, **other}
            found += [alone] if alone == whole else [alone, whole]
    return found


def train_or_refuse(group, path: Path, flags: Case) -> str:
    """What a rank ends with: nothing, its one line, or a traceback."""
    try:
        train(group, path, get_batch=pretrain_gpt.get_batch, train_iters=2, lr="1e-2", **flags)
    except (UserError, ValueError, OSError, ImportError) as error:  # of flags or of the run
        return f"refused: {error}"
    except BaseException:
        return traceback.format_exc()
    return ""


class PairRuns:
    """Runs of pairs on shared ranks, with the runs that they are compared with."""

    def __init__(self, folder: Path):
        self._folder = folder
        write_token_files(folder / "documents", random_documents(60, vocab_size=VOCAB, eod=VOCAB))
        chats = [CHATS[name] for name in ("turns", "tools", "thinking", "unicode")]
        write_chats(folder / "chats.jsonl", chats)
        self._names = {
            "DOCUMENTS": str(folder / "documents"),
            "CHATS": str(folder / "chats.jsonl"),
            "TOKENIZER": write_tokenizer(folder / "tokenizer"),
            "CACHE": str(folder / "cache"),
            "DISK": str(folder),
        }
        self._expected: dict[str, list[dict]] = {}
        self.counts: Counter[str] = Counter()

    def run(self, flags: Case) -> str | list[dict]:
        """The line of the refusal, or the metrics of two steps.

        Raises:
            AssertionError: the run ends otherwise, or ranks do not end alike.
        """
        path = self._folder / "metrics.jsonl"
        path.unlink(missing_ok=True)
        named = {k: self._names.get(v, v) if isinstance(v, str) else v for k, v in flags.items()}
        said = run_on_ranks(train_or_refuse, RANKS, path, {"vocab_size": VOCAB} | named)
        assert len(set(said)) == 1, f"{flags}: ranks say {said}"
        if not said[0]:
            return read_metrics(path)
        assert said[0].startswith("refused: "), f"{flags}:\n{said[0]}"
        lines = said[0].removeprefix("refused: ").removeprefix("error: ").split("\n")
        for line in lines:  # one for each mistake
            assert line.isprintable(), f"{flags}: {line!r}"
            assert "--" in line, f"{flags}: no flag in {line!r}"
            assert len(line) < 1000, f"{flags}: {line!r}"
        return said[0]

    def check(self, flags: Case) -> None:
        """Compare a pair with the run of the flags that change the function."""
        found = self.run(flags)
        self.counts["refused" if isinstance(found, str) else "trained"] += 1
        if isinstance(found, str):
            return
        own = {name: value for name, value in flags.items() if name in CHANGES_FUNCTION}
        if own.get("lora_rank"):
            own |= STREAMED
        key = repr(sorted(own.items(), key=repr))
        if key not in self._expected:
            expected = self.run(own)
            assert not isinstance(expected, str), f"{own} alone is refused: {expected}"
            self._expected[key] = expected
        loss, norm = (2e-2, 0.1) if flags.get("bf16") else (2e-5, 2e-4)
        for ours, theirs in zip(found, self._expected[key], strict=True):
            assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=loss), flags
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=norm), flags
            assert ours["valid_tokens"] == theirs["valid_tokens"], flags


def test_options_are_of_all_flags_of_their_groups():
    names = {
        name.removeprefix("--").replace("-", "_") for group in GROUPS for name, _ in FLAGS[group]
    }
    assert names <= {name for own, _ in OPTIONS for name in own}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return PairRuns(tmp_path_factory.mktemp("pairs"))


def test_a_sample_of_pairs_trains_or_is_refused(runs, fault_seed):
    for flags in random.Random(fault_seed).sample(pairs(), 16):
        runs.check(flags)
    assert min(runs.counts["trained"], runs.counts["refused"]) > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(8))
def test_every_pair_trains_or_is_refused(runs, part):
    for flags in pairs()[part::8]:
        runs.check(flags)
