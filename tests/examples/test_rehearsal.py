"""``--rehearse`` of the launchers: the same features at small sizes, end to end on CPUs."""

import json
import shlex
from pathlib import Path

import pytest

from megatron_untied.checkpoint.directory import latest_iteration
from megatron_untied.cli.arguments import parse_arguments
from tests.examples.launching import EXAMPLES, LAUNCHERS, fake_program, run
from tools.rehearsal_flags import rehearsal

RING = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 8 2"
RUN = (
    "--micro-batch-size 1 --lr 1e-4 --train-iters 100 --mock-data --tokenizer-type NullTokenizer "
    "--seq-length 4Mi --save here --save-interval 7 --use-torch-fsdp2"
)


@pytest.mark.parametrize(
    ("flags", "ranks", "expected"),
    [
        ("--model llama3-8b --context-parallel-size 8 --cp-heads-per-chunk 16", 2,
         {"parallel.context_parallel_size": 2, "parallel.heads_per_chunk": 4,
          "model.num_attention_heads": 32, "model.num_query_groups": 8}),
        (f"--model qwen3-32b --context-parallel-size 16 --cp-heads-per-chunk 8 {RING}", 4,
         {"parallel.hierarchical_context_parallel_sizes": (2, 2), "parallel.heads_per_chunk": 2,
          "model.qk_layernorm": True}),
        ("--model llama3.1-70b --tensor-model-parallel-size 8 --sequence-parallel "
         "--context-parallel-size 8 --cp-comm-type p2p", 4,
         {"parallel.tensor_model_parallel_size": 2, "parallel.num_ulysses_and_ring": (1, 2)}),
        ("--model llama3-8b --recompute-granularity full --recompute-num-layers 8 "
         "--cpu-offloading-num-layers 32 --sequence-tile-size 8Ki --park-during-attention", 1,
         {"memory.cpu_offloading_num_layers": 4, "memory.recompute_num_layers": 2,
          "memory.sequence_tile_size": 96, "memory.park_during_attention": True}),
        ("--model llama3-8b --lr-decay-style WSD --lr-wsd-decay-iters 30 --lr-warmup-iters 20 "
         "--eval-iters 50", 1,
         {"schedule.lr_wsd_decay_iters": 1, "schedule.lr_warmup_iters": 1,
          "evaluation.eval_iters": 1}),
        ("--model llama3-8b --metrics-jsonl m.jsonl", 1,
         {"logging.metrics_jsonl": "m.jsonl-rehearsal"}),
    ],
)  # fmt: skip
def test_a_rehearsal_has_the_features_of_the_run_and_few_ranks(flags, ranks, expected):
    argv = shlex.split(f"{RUN} {flags}")
    found, small = rehearsal(argv)
    assert found == ranks
    config = parse_arguments([*argv, *small], world_size=ranks)
    assert (config.batch.seq_length, config.loop.train_iters, config.checkpoint.save_interval) == (
        512, 4, 2,
    )  # fmt: skip
    assert config.model.vocab_size == 1001
    for path, value in expected.items():
        part, field = path.split(".")
        assert getattr(getattr(config, part), field) == value, path


def test_a_checkpoint_too_large_for_cpus_is_refused(tmp_path, monkeypatch):
    large = parse_arguments(shlex.split(f"{RUN} --model llama3-8b"), world_size=1).model
    monkeypatch.setattr("tools.rehearsal_flags.read_model_config", lambda *_: large)
    argv = shlex.split(f"{RUN} --load {tmp_path} --use-checkpoint-args --finetune")
    with pytest.raises(ValueError, match="has 8,030,261,248 weights, and a rehearsal trains at"):
        rehearsal(argv)


def rehearse(launcher: str, folder: Path) -> None:
    own, metrics = folder / "own", folder / "metrics.jsonl"
    command = ["bash", EXAMPLES / launcher, own, folder / "board", "--rehearse", "--metrics-jsonl"]
    done = run(*command, metrics, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, Path(f"{metrics}-rehearsal").read_text().splitlines())
    assert [line["iteration"] for line in lines if "lm_loss" in line] == [1, 2, 3, 4]
    assert latest_iteration(Path(f"{own}-rehearsal")) == 4
    assert not own.exists()  # a real run's
    assert not metrics.exists()
    assert "rehearsal: done, nothing failed" in done.stdout


@pytest.mark.slow  # a minute, as for the launchers in test_guide.py
@pytest.mark.timeout(900)
def test_a_launcher_plans_trains_saves_and_goes_on(tmp_path):
    rehearse("pretrain_8b_5m.sh", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_ring_of_ulysses_groups_is_rehearsed(tmp_path):
    rehearse("pretrain_32b_4m.sh", tmp_path)


@pytest.fixture
def without_python(tmp_path) -> dict[str, str]:
    """Variables with which no Python runs: two ranks are told, no flags."""
    return {"PATH": fake_program(tmp_path, "python", 'echo 2; echo "--seed"; echo 1')}


def test_a_rehearsal_deletes_only_what_a_rehearsal_made(without_python, tmp_path):
    folder = tmp_path / "own-rehearsal"
    folder.mkdir()
    (folder / "kept").write_text("results")
    command = ["bash", EXAMPLES / LAUNCHERS[0], f"{tmp_path}/own/", "--rehearse"]
    done = run(*command, folder=tmp_path, **without_python)
    assert done.returncode == 1
    assert f"error: {folder} was not made by a rehearsal" in done.stderr
    assert (folder / "kept").read_text() == "results"
    (folder / "made_by_rehearsal").touch()
    assert run(*command, folder=tmp_path, **without_python).returncode == 0
    assert not (folder / "kept").exists()


def test_nothing_is_deleted_for_flags_that_cannot_be(tmp_path):
    folder = tmp_path / "own-rehearsal"
    folder.mkdir()
    (folder / "made_by_rehearsal").touch()
    done = run("bash", EXAMPLES / LAUNCHERS[0], tmp_path / "own", "--rehearse", "--num-layerz", "2")
    assert done.returncode == 2
    assert "unknown flag --num-layerz" in done.stderr
    assert (folder / "made_by_rehearsal").exists()
