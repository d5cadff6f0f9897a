import json
import math
import sys
from types import SimpleNamespace

import pytest

from megatron_untied.config.run import LoggingConfig
from megatron_untied.training.metrics import (
    EvaluationMetrics,
    IterationMetrics,
    MetricsFile,
    open_sinks,
    read_metrics,
)

KEYS = {
    "iteration", "consumed_samples", "lm_loss", "grad_norm", "learning_rate", "valid_tokens",
    "skipped", "loss_spike", "step_seconds", "tokens_per_second_per_gpu", "tflops_per_gpu",
    "peak_device_bytes", "host_wait_seconds", "disk_wait_seconds",
}  # fmt: skip


def metrics(iteration: int, **values) -> IterationMetrics:
    return IterationMetrics(**dict.fromkeys(KEYS, 0) | {"iteration": iteration} | values)


def test_a_line_has_the_documented_keys_and_every_digit(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    with MetricsFile(path, start_iteration=0) as file:
        file.write(metrics(1, lm_loss=1 / 3))
        lines = path.read_text().splitlines()  # on disk before the file is closed
        file.write(EvaluationMetrics(iteration=1, validation_loss=2 / 3))
    assert json.loads(lines[0]).keys() == KEYS
    assert json.loads(lines[0])["lm_loss"] == 1 / 3
    assert read_metrics(path)[1] == {"iteration": 1, "validation_loss": 2 / 3}


def test_what_is_not_finite_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, start_iteration=0) as file:
        file.write(metrics(1, lm_loss=math.nan, grad_norm=math.inf))
    line = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert line["lm_loss"] is line["grad_norm"] is None


def test_a_resumed_run_moves_the_lines_it_will_write_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, start_iteration=0) as file:
        for iteration in (1, 2, 3, 4):
            file.write(metrics(iteration, lm_loss=float(iteration)))
        file.write(EvaluationMetrics(iteration=2, validation_loss=1.0))
    with path.open("a") as crashed:
        crashed.write('{"iteration": 5, "lm_lo')
    with MetricsFile(path, start_iteration=2) as file:
        file.write(metrics(3, lm_loss=-3.0))
    assert [line["iteration"] for line in read_metrics(path)] == [1, 2, 2, 3]
    assert read_metrics(path)[-1]["lm_loss"] == -3.0
    superseded = read_metrics(tmp_path / "metrics.jsonl.superseded")
    assert [line["lm_loss"] for line in superseded] == [3.0, 4.0]


def test_a_file_with_nothing_to_supersede_is_only_appended_to(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for iteration in (1, 2):
        with MetricsFile(path, start_iteration=iteration - 1) as file:
            file.write(metrics(iteration))
    assert [line["iteration"] for line in read_metrics(path)] == [1, 2]
    assert not (tmp_path / "metrics.jsonl.superseded").exists()


def test_tensorboard_gets_a_scalar_a_metric(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, loss in (
        (0, 1.0),
        (1, 2.0),
    ):  # iteration 2 is written twice: by a run and its resume
        logging = LoggingConfig(tensorboard_dir=str(tmp_path))
        (sink,) = open_sinks(logging, start_iteration=start)
        with sink:
            for iteration in range(start + 1, 3):
                sink.write(metrics(iteration, lm_loss=loss))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == KEYS - {"iteration"}
    assert [(e.step, e.value) for e in events.Scalars("lm_loss")] == [(1, 1.0), (2, 2.0)]


def test_wandb_gets_each_metric_at_its_iteration(monkeypatch):
    logged = []
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=list)
    wandb = SimpleNamespace(init=lambda project: run if project == "mine" else None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (sink,) = open_sinks(LoggingConfig(wandb_project="mine"), start_iteration=0)
    with sink:
        sink.write(EvaluationMetrics(iteration=3, validation_loss=0.5))
    assert logged == [(3, {"validation_loss": 0.5})]
