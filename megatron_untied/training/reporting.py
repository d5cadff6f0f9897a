"""Reports of a run: log lines, metrics of every step, and the summary at the end.

Log lines have Megatron's fields in Megatron's order, so that tools that parse its logs can read
them; our own fields follow. Only rank 0 prints and writes.
"""

import contextlib
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from megatron_untied.checkpoint import Progress
from megatron_untied.checkpoint.collective_errors import raise_on_all_ranks
from megatron_untied.checkpoint.directory import iteration_folder
from megatron_untied.config.run import RunConfig
from megatron_untied.flops import step_flops
from megatron_untied.platform import device
from megatron_untied.streaming.copy_engine import Wait
from megatron_untied.training.console import ProgressConsole
from megatron_untied.training.initialize import Launch
from megatron_untied.training.metrics import (
    EvaluationMetrics,
    IterationMetrics,
    open_sinks,
)
from megatron_untied.training.step import StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """Values of one log line, over the iterations since the line before."""

    time: datetime
    iteration: int
    train_iters: int
    consumed_samples: int
    seconds_per_iteration: float
    learning_rate: float
    """Of the next iteration, as in Megatron."""
    global_batch_size: int
    lm_loss: float
    """Mean over the iterations since the last line."""
    grad_norm: float
    skipped_iterations: int
    nan_iterations: int
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    peak_device_bytes: int
    log_throughput: bool = False
    """Add Megatron's throughput field, in Megatron's place."""
    stage: str | None = None
    """The stage of a run with several sequence lengths, such as 2/3."""
    seq_length: int = 0
    consumed_tokens: int = 0
    """Of ``consumed_samples``."""
    loss_spikes: int | None = None
    """Since the last line; None without ``--check-for-spiky-loss``."""
    waits: dict[Wait, float] = field(default_factory=dict)
    """Seconds per iteration on rank 0, for copies between device and host and for disks."""

    def __str__(self) -> str:
        """The line. The fields from tokens/s on are ours; the others are Megatron's."""
        throughput = f"throughput per GPU (TFLOP/s/GPU): {self.tflops_per_gpu:.1f}"
        fields = [
            f"iteration {self.iteration:8d}/{self.train_iters:8d}",
            f"consumed samples: {self.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {self.seconds_per_iteration * 1000:.1f}",
            *([throughput] if self.log_throughput else []),
            f"learning rate: {self.learning_rate:.6E}",
            f"global batch size: {self.global_batch_size:5d}",
            f"lm loss: {self.lm_loss:.6E}",
            "loss scale: 1.0",  # constant: neither bf16 nor fp32 needs loss scaling
            f"grad norm: {self.grad_norm:.3f}",
            f"number of skipped iterations: {self.skipped_iterations:3d}",
            f"number of nan iterations: {self.nan_iterations:3d}",
            f"tokens/s/GPU: {self.tokens_per_second_per_gpu:.1f}",
            f"model TFLOP/s/GPU: {self.tflops_per_gpu:.3f}",
            f"peak memory: {self.peak_device_bytes / 2**30:.3f} GiB",
        ]
        if self.stage:
            fields.append(f"stage: {self.stage} of {self.seq_length} tokens")
            fields.append(f"consumed tokens: {self.consumed_tokens:12d}")
        if self.loss_spikes is not None:
            fields.append(f"number of loss spikes: {self.loss_spikes:3d}")
        for source in sorted({wait.source for wait in self.waits}, reverse=True):  # host, disk
            phases = {w.phase: s * 1000 for w, s in self.waits.items() if w.source == source}
            longest = sorted(phases.items(), key=lambda item: -item[1])
            named = ", ".join(f"{phase} {ms:.1f}" for phase, ms in longest)
            fields.append(f"waits for {source} (ms): {sum(phases.values()):.1f} ({named})")
        return f" [{self.time:%Y-%m-%d %H:%M:%S}] " + " | ".join(fields) + " |"


@dataclass(slots=True)
class LossSpikes:
    """Megatron's test: 10 times the largest loss of the first 100 iterations of a process."""

    factor: float = 10.0
    num_first: int = 100
    _largest: float = 0.0
    _count: int = 0

    def is_spike(self, loss: float) -> bool:
        """Whether ``loss``, the next one, is a spike; one that is not finite is none."""
        if not math.isfinite(loss):
            return False
        if self._count < self.num_first:
            self._count, self._largest = self._count + 1, max(self._largest, loss)
            return False
        return loss >= self.factor * self._largest


def evaluation_line(iteration: int, loss: float) -> str:
    """Megatron's line after an evaluation, with the perplexity capped at a loss of 20 as there."""
    return (
        f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | "
        f"lm loss PPL: {math.exp(min(20, loss)):.6E} |"
    )


@dataclass(kw_only=True, slots=True)
class RunSummary:
    """Totals of a run, updated during it and printed at its end."""

    config: RunConfig
    start: Progress
    """Iterations and samples done before this run."""
    progress: Progress
    """Iterations and samples done so far."""
    checkpoint: Path | None
    """The last checkpoint that was saved, or else the one that was loaded."""
    step_seconds: float = 0.0
    """Total time of all optimizer steps."""
    train_loss: float | None = None
    validation: tuple[int, float] | None = None
    """Iteration and loss of the last evaluation."""
    _began: float = field(default_factory=time.monotonic)

    def resume_advice(self) -> str:
        """Text: the last checkpoint and the flag that resumes from it, or what is lost."""
        if self.checkpoint is None:
            lost = self.progress.iteration - self.start.iteration
            remedy = (
                "--save-interval saves more often" if self.config.checkpoint.save else "give --save"
            )
            return f"no checkpoint was saved ({lost} iterations are lost); {remedy}"
        return f"the last checkpoint is {self.checkpoint}; --load {self.checkpoint.parent} resumes"

    def __str__(self) -> str:
        """A line each for iterations, losses, tokens and output paths."""
        config = self.config
        iterations = self.progress.iteration - self.start.iteration
        tokens = config.num_tokens(self.start.iteration, self.progress.iteration)
        elapsed = timedelta(seconds=round(time.monotonic() - self._began))
        lines = [
            f"iterations: {self.progress.iteration} of {config.loop.train_iters}, "
            f"{iterations} in this run"
        ]
        if self.train_loss is not None:
            lines.append(f"train loss: {self.train_loss:.6f}")
        if self.validation is not None:
            iteration, loss = self.validation
            lines.append(f"validation loss: {loss:.6f} (iteration {iteration})")
        speed = f" ({tokens / self.step_seconds:,.0f} tokens/s)" if self.step_seconds else ""
        trained = timedelta(seconds=round(self.step_seconds))
        lines.append(f"tokens: {tokens:,} in {trained} of training{speed}; {elapsed} in total")
        lines.append(f"checkpoint: {self.resume_advice()}")
        outputs = {
            "TensorBoard": config.logging.tensorboard_dir,
            "metrics": config.logging.metrics_jsonl,
            "Weights & Biases": config.logging.wandb_project,
        }
        lines += [f"{name}: {path}" for name, path in outputs.items() if path]
        return "\n".join(["summary", *(f"  {line}" for line in lines)])


class Reporter:
    """Writes metrics of every step and prints a log line every ``log_interval`` steps.

    Leaving the context closes the files. On ranks other than 0 nothing is printed or written, but
    the summary is kept, because a signal prints resume advice on whichever rank receives it.
    """

    def __init__(self, config: RunConfig, launch: Launch, *, start: Progress):
        self._start = start.iteration
        loaded = iteration_folder(Path(config.checkpoint.load or ""), start.iteration)
        self.summary = RunSummary(
            config=config,
            start=start,
            progress=start,
            checkpoint=loaded if start.iteration else None,
        )
        self._active, self._world_size = launch.rank == 0, launch.world_size
        self._since_line: list[IterationMetrics] = []
        self._waits: Counter[Wait] = Counter()
        self._spikes = LossSpikes() if config.loop.check_for_spiky_loss else None
        self._open = contextlib.ExitStack()
        self.enter_stage(config)

    def enter_stage(self, config: RunConfig) -> None:
        """Report iterations of the batch of ``config`` from now on; a line has those of one."""
        if self._since_line:
            self._print_line()
        self._config = self.summary.config = config
        # Over all ranks; divided by the world size where it is reported per GPU.
        self._flops = step_flops(
            config.model,
            seq_length=config.batch.seq_length,
            num_samples=config.batch.global_batch_size,
        )

    def open_sinks(self) -> None:
        """Open the metrics sinks of rank 0; collective: an error is raised on all ranks."""
        logging, start = self._config.logging, self._start
        self._sinks = raise_on_all_ranks(
            lambda: open_sinks(logging, start_iteration=start) if self._active else []
        )
        for sink in self._sinks:
            self._open.enter_context(sink)

    def __enter__(self) -> "Reporter":
        if self._active:
            self._console = ProgressConsole(start=self._start, total=self._config.loop.train_iters)
            self._open.enter_context(self._console.bar)
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        if self._active:
            self._console.print(f" {line}")

    def step(
        self,
        result: StepResult,
        progress: Progress,
        *,
        seconds: float,
        waits: dict[Wait, float],
    ) -> None:
        """Report an optimizer step.

        Args:
            result: of the step.
            progress: iterations and samples done, including this step.
            seconds: duration of the step on this rank.
            waits: seconds of it on this rank in which compute waited for the host and for disks.
        """
        # On all ranks: each may have to print resume advice when it is signaled.
        self.summary.progress = progress
        self.summary.train_loss = result.lm_loss
        self.summary.step_seconds += seconds
        if not self._active:
            return
        totals = dict.fromkeys(("host", "disk"), 0.0)
        for wait, waited in waits.items():
            totals[wait.source] += waited
        self._waits.update(waits)
        is_spike = self._spikes is not None and self._spikes.is_spike(result.lm_loss)
        metrics = IterationMetrics(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            lm_loss=result.lm_loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            valid_tokens=result.valid_tokens,
            skipped=int(not result.updated),
            loss_spike=int(is_spike),
            step_seconds=seconds,
            tokens_per_second_per_gpu=self._config.batch.tokens / seconds / self._world_size,
            tflops_per_gpu=self._flops / 1e12 / seconds / self._world_size,
            peak_device_bytes=device.peak_device_bytes(),
            host_wait_seconds=totals["host"],
            disk_wait_seconds=totals["disk"],
        )
        for sink in self._sinks:
            sink.write(metrics)
        self._since_line.append(metrics)
        if is_spike or not result.updated:
            what = "is a spike" if is_spike else "or its gradient is not finite: no update"
            loss = f"lm loss of iteration {progress.iteration}, {result.lm_loss:.6E}"
            self.say(f"warning: the {loss}, {what}")
        self._console.advance(progress.iteration)
        if progress.iteration % self._config.logging.log_interval == 0:
            self._print_line()

    def evaluation(self, iteration: int, validation_loss: float) -> None:
        """Report the loss of an evaluation after ``iteration``."""
        self.summary.validation = iteration, validation_loss
        if not self._active:
            return
        for sink in self._sinks:
            sink.write(EvaluationMetrics(iteration=iteration, validation_loss=validation_loss))
        self._console.print(evaluation_line(iteration, validation_loss))

    def saved(self, checkpoint: Path) -> None:
        """Report that a checkpoint is complete."""
        self.summary.checkpoint = checkpoint
        self.say(f"saved {checkpoint}")

    def nothing_to_train(self) -> None:
        """Print that the checkpoint already has all iterations, and the summary."""
        iteration = self.summary.progress.iteration
        self.say(
            f"nothing to train: the checkpoint is of iteration {iteration} and --train-iters is "
            f"{self._config.loop.train_iters}; give a larger --train-iters to continue"
        )
        self.end()

    def end(self, exit_reason: str | None = None) -> None:
        """Print the end of the run and its summary.

        Args:
            exit_reason: why the run ends before its last iteration, if it does.
        """
        if exit_reason:
            self.say(f"exiting after iteration {self.summary.progress.iteration}: {exit_reason}")
        for line in str(self.summary).splitlines():
            self.say(line)

    def _stage_at(self, iteration: int) -> str | None:
        if not (stages := self._config.stages):
            return None
        return f"{self._config.stage_of(iteration) + 1}/{len(stages)}"

    def _print_line(self) -> None:
        steps, last, config = self._since_line, self._since_line[-1], self._config
        seconds = sum(step.step_seconds for step in steps)
        trained = [step.lm_loss for step in steps if not step.skipped]
        line = LogLine(
            time=datetime.now(),
            iteration=last.iteration,
            train_iters=config.loop.train_iters,
            consumed_samples=last.consumed_samples,
            seconds_per_iteration=seconds / len(steps),
            learning_rate=last.learning_rate,
            global_batch_size=config.batch.global_batch_size,
            # Every step has the same weight, whatever its number of valid tokens, and skipped ones
            # have none, as in Megatron.
            lm_loss=sum(trained) / len(trained) if trained else math.nan,
            grad_norm=last.grad_norm,
            skipped_iterations=sum(step.skipped for step in steps),
            nan_iterations=sum(not math.isfinite(step.lm_loss) for step in steps),
            tokens_per_second_per_gpu=len(steps) * config.batch.tokens / seconds / self._world_size,
            tflops_per_gpu=len(steps) * self._flops / 1e12 / seconds / self._world_size,
            peak_device_bytes=max(step.peak_device_bytes for step in steps),
            log_throughput=config.logging.log_throughput,
            stage=self._stage_at(last.iteration),
            seq_length=config.batch.seq_length,
            consumed_tokens=config.num_tokens(self.summary.start.data_start, last.iteration),
            loss_spikes=sum(step.loss_spike for step in steps) if self._spikes else None,
            waits={wait: seconds / len(steps) for wait, seconds in self._waits.items()},
        )
        self._console.print(str(line))
        self._console.report(last.iteration)
        self._since_line, self._waits = [], Counter()
