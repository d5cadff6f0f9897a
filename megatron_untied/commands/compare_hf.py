"""Compare the loss of a Hugging Face folder by transformers and by this repository, token by token.

    python tools/compare_hf.py Llama-3.2-1B --text-file some.txt --num-tokens 512
    python tools/compare_hf.py Llama-3.2-1B --context-parallel-size 2

Without --text-file the tokens are random. Both compute in fp32, on the CPU or, where there are
GPUs, on one for each rank. They run one after the other, so that the memory of one is enough: 4
bytes a parameter. The folder is imported into a temporary one,
as large as the model. Exit status 0 if they agree, 1 if not, 2 for a folder or flags that cannot
be.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, multiprocessing

import megatron_untied  # noqa: F401  (prepares megatron-core for a machine without CUDA)
from megatron_untied.checkpoint import CheckpointState, load_checkpoint
from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.cli.flag_values import integer
from megatron_untied.commands import documentation
from megatron_untied.context_parallel.sequence import SequenceLayout
from megatron_untied.data.tokenizers import build_tokenizer
from megatron_untied.hf import Import
from megatron_untied.model import Runtime, attention_kernel, build_model
from megatron_untied.planner.report import print_line, print_table
from megatron_untied.platform import device
from megatron_untied.sharding.parameter_layout import parameter_layouts
from megatron_untied.sharding.shards import ModelShards
from megatron_untied.training.initialize import Launch, initialize

SAFETY = 16
"""Times the error that sums of rounded terms are expected to have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Of one implementation: cross-entropy of every token but the first, [s] fp64, and the mean."""

    by_token: Tensor
    mean: float


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; the exit status."""
    args = parser().parse_args(argv)
    try:
        source = Import.open(args.hf_path)
        tokens = text_tokens(args, source.model.vocab_size)
        largest, theirs = by_transformers(args.hf_path, tokens)
        with tempfile.TemporaryDirectory(prefix="compare-hf-") as folder:
            source.write(Path(folder) / "checkpoint", lambda _: None)
            ours = by_us(Path(folder), source, tokens, args.context_parallel_size)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return report(theirs, ours, tolerance(source, largest), largest)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    built = argparse.ArgumentParser(
        description=documentation(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    built.add_argument("hf_path", type=Path, metavar="FOLDER", help="a Hugging Face folder")
    built.add_argument("--text-file", type=Path, help="text, by the folder's own tokenizer")
    built.add_argument("--num-tokens", type=integer(1), default=256, help="tokens compared (256)")
    built.add_argument("--seed", type=int, default=1, help="of random tokens (1)")
    built.add_argument(
        "--context-parallel-size", type=integer(1), default=1, help="ranks that share them (1)"
    )
    return built


def text_tokens(args: argparse.Namespace, vocab_size: int) -> Tensor:
    """[1, --num-tokens + 1] int64: of the text, or random."""
    p, count = args.context_parallel_size, args.num_tokens
    if count % p:
        raise ValueError(
            f"--num-tokens {count} does not divide over --context-parallel-size {p}; "
            f"{max(p, count - count % p)} does"
        )
    if args.text_file is None:
        generator = torch.Generator().manual_seed(args.seed)
        return torch.randint(vocab_size, (1, count + 1), generator=generator)
    text = args.text_file.read_text()
    found = build_tokenizer("HuggingFaceTokenizer", model=str(args.hf_path)).tokenize(text)
    if len(found) <= count:
        raise ValueError(
            f"--text-file {args.text_file} has {len(found)} tokens, and {count + 1} are needed; "
            "give a longer text or a lower --num-tokens"
        )
    return torch.tensor([found[: count + 1]])


@torch.no_grad()
def by_transformers(folder: Path, tokens: Tensor) -> tuple[float, Losses]:
    """The largest logit's magnitude, and the losses."""
    from transformers import AutoModelForCausalLM  # seconds to import, and not for --help

    # fp32 whatever the folder has: two roundings to bf16 would hide a real difference.
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()
    model, tokens = model.to(device.select_device(0)), tokens.to(device.select_device(0))
    answer = model(input_ids=tokens, labels=tokens)
    logits = answer.logits[0, :-1]
    return logits.abs().max().item(), Losses(
        by_token=cross_entropy(logits, tokens[0, 1:]).cpu(), mean=answer.loss.item()
    )


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """[s, v] and [s] -> [s] fp64."""
    return torch.cat(
        [
            # 256 tokens at a time: fp64 logits of all of them would be 8 s v bytes.
            F.cross_entropy(some.double(), wanted, reduction="none")
            for some, wanted in zip(logits.split(256), labels.split(256), strict=True)
        ]
    )


def by_us(folder: Path, source: Import, tokens: Tensor, num_ranks: int) -> Losses:
    """The losses of the checkpoint in ``folder``, on ranks that are started for it."""
    flags = [
        *("--load", str(folder / "checkpoint"), "--use-checkpoint-args", "--finetune"),
        *("--seq-length", str(tokens.size(1) - 1), "--context-parallel-size", str(num_ranks)),
        *("--mock-data", "--tokenizer-type", "NullTokenizer"),
        *("--vocab-size", str(source.model.vocab_size - 1)),  # and an end of document
        # Required of a training run, and not used here.
        *("--micro-batch-size", "1", "--train-iters", "1", "--lr", "1"),
    ]
    if tokens.size(1) > source.model.max_position_embeddings:
        flags += ["--max-position-embeddings", str(tokens.size(1))]
    parse_arguments(flags, world_size=num_ranks)  # a mistake is one message, before ranks start
    if num_ranks == 1:
        _rank(0, 1, folder, flags, tokens)  # in this process, whose errors keep their traceback
    else:
        multiprocessing.spawn(_rank, (num_ranks, folder, flags, tokens), nprocs=num_ranks)
    parts = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(num_ranks)]
    return Losses(
        by_token=torch.cat([by_token for by_token, _ in parts]),
        mean=sum(loss.item() for _, loss in parts),
    )


@torch.no_grad()
def _rank(rank: int, num_ranks: int, folder: Path, flags: list[str], tokens: Tensor) -> None:
    """One rank: load the checkpoint, write the losses of its tokens and its part of the mean."""
    config = parse_arguments(flags, world_size=num_ranks)
    # In the temporary folder, so that no port can be taken.
    store = dist.FileStore(str(folder / "store"), num_ranks)
    launch = Launch(rank=rank, world_size=num_ranks, local_rank=rank)
    groups = initialize(config, launch, store)
    here = device.current_device()
    with here:
        model = build_model(
            config.model,
            config.parallel,
            config.memory,
            config.precision,
            groups,
            runtime=Runtime(kernel=attention_kernel(config)),
        ).eval()
    state = CheckpointState(
        model_config=config.model,
        layouts=parameter_layouts(model, config.model, tp_rank=0, tp_size=1),
        shards=ModelShards(model),
        groups=groups,
    )
    load_checkpoint(config.checkpoint, state, seed=config.seed)
    layout, tokens = SequenceLayout.of(config.parallel, rank=groups.cp.rank()), tokens.to(here)
    inputs, labels = layout.shard(tokens[:, :-1]), layout.shard(tokens[:, 1:])
    weights = torch.full(labels.shape, 1 / (tokens.numel() - 1), device=here)
    loss = model(inputs, labels=labels, token_weights=weights)
    # A second forward, without labels. The softmax excludes the padding of the vocabulary.
    logits = model(inputs)[0, :, : config.model.vocab_size]
    torch.save((cross_entropy(logits, labels[0]).cpu(), loss.cpu()), folder / f"{rank}.pt")
    from megatron.core import parallel_state  # not before megatron_untied, which ruff would sort

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def tolerance(source: Import, largest_logit: float) -> float:
    """What fp32 may change of a token's loss: nats.

    Each of a logit's sums has as many terms as the model is wide, and its input the errors of all
    layers: errors of random sign that add up as their number's root.
    """
    eps = torch.finfo(torch.float32).eps
    terms = source.model.hidden_size * source.model.num_layers
    return SAFETY * eps * max(1.0, largest_logit) * terms**0.5


def report(theirs: Losses, ours: Losses, tolerated: float, largest_logit: float) -> int:
    """Print both and the verdict; the exit status."""
    console = Console(highlight=False)
    differences = (ours.by_token - theirs.by_token).abs()
    worst = int(differences.argmax())
    rows = {
        "mean loss": [
            f"{theirs.mean:.6f}",
            f"{ours.mean:.6f}",
            f"{abs(ours.mean - theirs.mean):.2e}",
        ],
        f"token {worst + 1}, the worst": [
            f"{theirs.by_token[worst]:.6f}",
            f"{ours.by_token[worst]:.6f}",
            f"{differences[worst]:.2e}",
        ],
    }
    print_table(console, "loss, nats", "of", ["transformers", "ours", "difference"], rows)
    most = max(differences[worst].item(), abs(ours.mean - theirs.mean))
    agrees = most <= tolerated  # nan does not
    print_line(
        console,
        f"{'agrees' if agrees else 'DIFFERS'}: {most:.2e} of at most {tolerated:.2e} on "
        f"{differences.numel():,} tokens; sums in another order may change that much in fp32, "
        f"with logits up to {largest_logit:.3g}",
    )
    return 0 if agrees else 1
