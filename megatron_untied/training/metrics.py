"""Sinks of a run's metrics: a JSON-lines file, TensorBoard, Weights & Biases."""

import json
import math
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from typing_extensions import override

from megatron_untied.checkpoint.directory import make_writable
from megatron_untied.config.run import LoggingConfig, RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationMetrics:
    """Metrics of one optimizer step; the field names are the keys in the metrics file."""

    iteration: int
    consumed_samples: int
    """Samples trained on so far, including this step."""
    lm_loss: float
    """Mean cross-entropy in nats over the valid tokens of the global batch."""
    grad_norm: float
    """L2 norm of the whole gradient before clipping."""
    learning_rate: float
    """As Megatron reports it: the schedule's value after ``consumed_samples``."""
    valid_tokens: int
    skipped: int
    """1 if nothing was updated, because the loss or the gradient was not finite; else 0."""
    loss_spike: int
    """1 for a spike, with ``--check-for-spiky-loss``; else 0."""
    step_seconds: float
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    """10^12 model FLOP per second, causal attention counted as half; see ``flops.py``."""
    peak_device_bytes: int
    """Peak of allocated bytes on rank 0 since the end of the step before; includes an evaluation or
    a checkpoint in between."""
    host_wait_seconds: float
    """For which compute on rank 0 waited for copies between device and host."""
    disk_wait_seconds: float
    """For which it waited for ``--activation-disk``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationMetrics:
    """Result of one evaluation on the validation samples."""

    iteration: int
    validation_loss: float
    """Mean cross-entropy in nats over their valid tokens."""


Metrics = IterationMetrics | EvaluationMetrics


class MetricsSink(AbstractContextManager):
    """A destination of metrics; leaving the context closes it."""

    close: Callable[[], None]
    """Set by subclasses."""

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def write(self, metrics: Metrics) -> None:
        """Append the metrics of one step or evaluation."""


class MetricsFile(MetricsSink):
    """A file with one JSON object per line; floats keep all digits, each line is flushed.

    The file has one history. A run that starts at iteration k first moves the lines after k, which
    it will write again, to ``FILE.superseded``.
    """

    def __init__(self, path: Path, *, start_iteration: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept, superseded = [], []
        for line in read_metrics(path) if path.exists() else []:
            lines = superseded if line["iteration"] > start_iteration else kept
            lines.append(json.dumps(line) + "\n")
        if superseded:
            with path.with_name(path.name + ".superseded").open("a") as file:
                file.writelines(superseded)
        # Replaced in one step: a crash in between leaves the old file or the new one. Rewritten
        # even if no line moves, because a crash may have cut the last line short.
        rewritten = path.with_name(path.name + ".tmp")
        rewritten.write_text("".join(kept))
        rewritten.replace(path)
        self._file = path.open("a")
        self.close = self._file.close

    @override
    def write(self, metrics: Metrics) -> None:
        # JSON has no nan and no infinity: they become null.
        values = {k: v if math.isfinite(v) else None for k, v in asdict(metrics).items()}
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()  # a step may take an hour, and the file is read while the run goes on


class TensorBoardEvents(MetricsSink):
    """TensorBoard scalars, one per metric; steps after the start, of an earlier run, are hidden."""

    def __init__(self, folder: str, *, start_iteration: int):
        from torch.utils.tensorboard import SummaryWriter  # optional package, slow to import

        self._writer = SummaryWriter(folder, purge_step=start_iteration + 1)
        self.close = self._writer.close

    @override
    def write(self, metrics: Metrics) -> None:
        for name, value in asdict(metrics).items():
            if name != "iteration":  # the x axis of all others
                self._writer.add_scalar(name, value, metrics.iteration)


class WandbRun(MetricsSink):
    """A run of a Weights & Biases project; ``arguments.py`` checked that wandb is installed."""

    def __init__(self, project: str):
        import wandb  # optional package

        self._run = wandb.init(project=project)
        self.close = self._run.finish

    @override
    def write(self, metrics: Metrics) -> None:
        values = asdict(metrics)
        self._run.log(values, step=values.pop("iteration"))


def open_sinks(logging: LoggingConfig, *, start_iteration: int) -> list[MetricsSink]:
    """Open a sink for each destination in ``logging``; called on rank 0 only."""
    sinks: list[MetricsSink] = []
    if logging.metrics_jsonl:
        sinks.append(MetricsFile(Path(logging.metrics_jsonl), start_iteration=start_iteration))
    if logging.tensorboard_dir:
        sinks.append(TensorBoardEvents(logging.tensorboard_dir, start_iteration=start_iteration))
    if logging.wandb_project:
        sinks.append(WandbRun(logging.wandb_project))
    return sinks


def require_output_paths(config: RunConfig) -> None:
    """Check that checkpoints and metrics can be written, before anything is computed.

    Folders that do not exist are created.

    Raises:
        ValueError: a path cannot be written; the message names the flag.
    """
    logging = config.logging
    if config.checkpoint.save:
        make_writable(Path(config.checkpoint.save), "--save")
    if logging.tensorboard_dir:
        make_writable(Path(logging.tensorboard_dir), "--tensorboard-dir")
    if logging.metrics_jsonl:
        path = Path(logging.metrics_jsonl)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()  # os.access may allow what a network drive refuses
        except OSError as error:
            raise ValueError(
                f"--metrics-jsonl {path} cannot be written ({error.strerror}: {error.filename}); "
                "give a file in a folder that can be created and written"
            ) from error
        try:
            is_metrics = all(
                isinstance(line, dict) and "iteration" in line for line in read_metrics(path)
            )
        except ValueError:
            is_metrics = False
        if not is_metrics:
            raise ValueError(
                f"--metrics-jsonl {path} exists and is not a metrics file; give another path"
            )


def read_metrics(path: Path) -> list[dict]:
    """Read the lines of a metrics file, without a last line that a crash cut short."""
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
