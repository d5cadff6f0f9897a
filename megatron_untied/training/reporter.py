"""What a run tells about itself: the console and the metrics, from rank 0 alone."""

import contextlib
import math
from datetime import datetime
from pathlib import Path

from megatron_untied.checkpoint import Progress
from megatron_untied.checkpoint.agreement import on_every_rank
from megatron_untied.checkpoint.directory import iteration_folder, make_writable
from megatron_untied.platform import device
from megatron_untied.training.config import RunConfig
from megatron_untied.training.flops import step_flops
from megatron_untied.training.initialize import Launch
from megatron_untied.training.log_line import LogLine, evaluation_line
from megatron_untied.training.metrics import (
    EvaluationMetrics,
    IterationMetrics,
    MetricsSink,
    open_sinks,
    require_writable,
)
from megatron_untied.training.progress import ProgressConsole
from megatron_untied.training.step import StepResult
from megatron_untied.training.summary import RunSummary


class Reporter:
    """Writes every step's metrics, and a log line every ``log_interval`` steps.

    A context: files close when it is left. On ranks other than the first all of it does nothing.
    """

    def __init__(self, config: RunConfig, launch: Launch, *, start: Progress):
        self._config, self._start = config, start.iteration
        loaded = iteration_folder(Path(config.checkpoint.load or ""), start.iteration)
        self.summary = RunSummary(
            config=config,
            start=start,
            progress=start,
            checkpoint=loaded if start.iteration else None,
        )
        self._active, self._world_size = launch.rank == 0, launch.world_size
        self._flops = step_flops(
            config.model,
            seq_length=config.batch.seq_length,
            num_samples=config.batch.global_batch_size,
        )
        self._since_line: list[IterationMetrics] = []
        self._skipped = self._nan = 0
        self._open = contextlib.ExitStack()

    def open_sinks(self) -> None:
        """Open where metrics are kept; collective over all ranks, which fail together."""
        self._sinks = on_every_rank(self._opened_sinks)

    def __enter__(self) -> "Reporter":
        if self._active:
            self._console = self._open.enter_context(
                ProgressConsole(start=self._start, total=self._config.loop.train_iters)
            )
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def say(self, line: str) -> None:
        """Print a line of the run's own."""
        if self._active:
            self._console.print(f" {line}")

    def step(self, result: StepResult, progress: Progress, *, seconds: float) -> None:
        """The optimizer step that led to ``progress`` took ``seconds``."""
        self.summary.progress = progress
        self.summary.train_loss = result.lm_loss
        self.summary.step_seconds += seconds
        if not self._active:
            return
        metrics = IterationMetrics(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            lm_loss=result.lm_loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            valid_tokens=result.valid_tokens,
            step_seconds=seconds,
            tokens_per_second_per_gpu=self._config.batch.tokens / seconds / self._world_size,
            tflops_per_gpu=self._flops / 1e12 / seconds / self._world_size,
            peak_device_bytes=device.peak_device_bytes(),
        )
        device.reset_peak_device_bytes()
        for sink in self._sinks:
            sink.write(metrics)
        self._since_line.append(metrics)
        self._skipped += not result.updated
        self._nan += not math.isfinite(result.lm_loss)
        self._console.advance(progress.iteration)
        if progress.iteration % self._config.logging.log_interval == 0:
            self._print_line()

    def evaluation(self, iteration: int, validation_loss: float) -> None:
        """An evaluation after ``iteration`` gave ``validation_loss``."""
        self.summary.validation = iteration, validation_loss
        if not self._active:
            return
        for sink in self._sinks:
            sink.write(EvaluationMetrics(iteration=iteration, validation_loss=validation_loss))
        self._console.print(evaluation_line(iteration, validation_loss))

    def saved(self, checkpoint: Path) -> None:
        """A checkpoint is complete."""
        self.summary.checkpoint = checkpoint
        self.say(f"saved {checkpoint}")

    def end(self, exit_reason: str | None = None) -> None:
        """The run ends, before its last iteration if there is a reason."""
        if exit_reason:
            self.say(f"exiting after iteration {self.summary.progress.iteration}: {exit_reason}")
        for line in str(self.summary).splitlines():
            self.say(line)

    def _opened_sinks(self) -> list[MetricsSink]:
        if not self._active:
            return []
        sinks = open_sinks(self._config.logging, start_iteration=self._start)
        return [self._open.enter_context(sink) for sink in sinks]

    def _print_line(self) -> None:
        steps, last, config = self._since_line, self._since_line[-1], self._config
        seconds = sum(step.step_seconds for step in steps)
        line = LogLine(
            time=datetime.now(),
            iteration=last.iteration,
            train_iters=config.loop.train_iters,
            consumed_samples=last.consumed_samples,
            seconds_per_iteration=seconds / len(steps),
            learning_rate=last.learning_rate,
            global_batch_size=config.batch.global_batch_size,
            lm_loss=sum(step.lm_loss for step in steps) / len(steps),
            grad_norm=last.grad_norm,
            skipped_iterations=self._skipped,
            nan_iterations=self._nan,
            tokens_per_second_per_gpu=len(steps) * config.batch.tokens / seconds / self._world_size,
            tflops_per_gpu=len(steps) * self._flops / 1e12 / seconds / self._world_size,
            peak_device_bytes=max(step.peak_device_bytes for step in steps),
            log_throughput=config.logging.log_throughput,
        )
        self._console.print(str(line))
        self._console.report(last.iteration)
        self._since_line, self._skipped, self._nan = [], 0, 0


def require_places(config: RunConfig) -> None:
    """Check that results can be written where the flags say, before anything is computed.

    Raises:
        ValueError: names the flag.
    """
    if config.checkpoint.save:
        make_writable(Path(config.checkpoint.save), "--save")
    require_writable(config.logging)
