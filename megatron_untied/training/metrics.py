"""Where numbers of a run are kept: a JSON-lines file, TensorBoard, Weights & Biases."""

import json
import math
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from megatron_untied.checkpoint.directory import make_writable
from megatron_untied.config.run import LoggingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationMetrics:
    """One optimizer step. The field names are the keys of the metrics file."""

    iteration: int
    consumed_samples: int
    """Samples trained on so far, this step's included."""
    lm_loss: float
    """Mean cross-entropy in nats over the valid tokens of the global batch."""
    grad_norm: float
    """L2 norm of the whole gradient, before clipping."""
    learning_rate: float
    """As Megatron reports it: what the schedule gives once ``consumed_samples`` are consumed."""
    valid_tokens: int
    step_seconds: float
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    """10^12 model operations a second, causal attention counted as half; see ``flops.py``."""
    peak_device_bytes: int
    """Most bytes of tensors alive at once on rank 0 since the step before ended: an evaluation or a
    checkpoint in between counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationMetrics:
    """One evaluation on the validation samples."""

    iteration: int
    validation_loss: float
    """Mean cross-entropy in nats over all their valid tokens."""


Metrics = IterationMetrics | EvaluationMetrics


class MetricsSink(AbstractContextManager, Protocol):
    """Something that keeps metrics until it is left."""

    def write(self, metrics: Metrics) -> None:
        """Keep one more."""


class MetricsFile:
    """One JSON object a line, floats with every digit, each line on disk before training goes on.

    The file tells one history: a run that starts from iteration k first moves the lines past k,
    which it will write again, to ``FILE.superseded``.
    """

    def __init__(self, path: Path, *, start_iteration: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _supersede(path, start_iteration)
        self._file = path.open("a")

    def write(self, metrics: Metrics) -> None:
        """Append a line and flush it; what is not finite is null, as JSON has no nan."""
        values = {name: _finite(value) for name, value in asdict(metrics).items()}
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


class TensorBoardEvents:
    """A scalar a metric. Steps past the first iteration, left by a run before, are hidden."""

    def __init__(self, folder: str, *, start_iteration: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=start_iteration + 1)

    def write(self, metrics: Metrics) -> None:
        """One point on each metric's curve, at its iteration."""
        for name, value in asdict(metrics).items():
            if name != "iteration":
                self._writer.add_scalar(name, value, metrics.iteration)

    def __enter__(self) -> "TensorBoardEvents":
        return self

    def __exit__(self, *exception: object) -> None:
        self._writer.close()


class WandbRun:
    """A run of a Weights & Biases project; ``arguments.py`` has seen that wandb is installed."""

    def __init__(self, project: str):
        import wandb

        self._run = wandb.init(project=project)

    def write(self, metrics: Metrics) -> None:
        """Log the metrics at their iteration."""
        values = asdict(metrics)
        self._run.log(values, step=values.pop("iteration"))

    def __enter__(self) -> "WandbRun":
        return self

    def __exit__(self, *exception: object) -> None:
        self._run.finish()


def open_sinks(logging: LoggingConfig, *, start_iteration: int) -> list[MetricsSink]:
    """A sink for each place that ``logging`` names; for rank 0 alone."""
    sinks: list[MetricsSink] = []
    if logging.metrics_jsonl:
        sinks.append(MetricsFile(Path(logging.metrics_jsonl), start_iteration=start_iteration))
    if logging.tensorboard_dir:
        sinks.append(TensorBoardEvents(logging.tensorboard_dir, start_iteration=start_iteration))
    if logging.wandb_project:
        sinks.append(WandbRun(logging.wandb_project))
    return sinks


def require_writable(logging: LoggingConfig) -> None:
    """Make the folders that sinks write to.

    Raises:
        ValueError: nothing can be written there; names the flag.
    """
    if logging.tensorboard_dir:
        make_writable(Path(logging.tensorboard_dir), "--tensorboard-dir")
    if logging.metrics_jsonl:
        path = Path(logging.metrics_jsonl)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise ValueError(
                f"--metrics-jsonl {path} cannot be written ({error.strerror}: {error.filename}); "
                "give a file in a folder that can be made and written to"
            ) from error
        try:
            ours = all(
                isinstance(line, dict) and "iteration" in line for line in read_metrics(path)
            )
        except ValueError:
            ours = False
        if not ours:
            raise ValueError(
                f"--metrics-jsonl {path} exists and is not a metrics file; give another name"
            )


def read_metrics(path: Path) -> list[dict]:
    """The lines of a metrics file; one cut short by a crash is left out."""
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _supersede(path: Path, start_iteration: int) -> None:
    """Move lines past ``start_iteration`` out of the file, and end it with a whole line."""
    kept, past = [], []
    for line in read_metrics(path):
        (past if line["iteration"] > start_iteration else kept).append(json.dumps(line) + "\n")
    if past:
        with path.with_name(path.name + ".superseded").open("a") as superseded:
            superseded.writelines(past)
    rewritten = path.with_name(path.name + ".tmp")
    rewritten.write_text("".join(kept))
    rewritten.replace(path)
