"""The lines that a run prints: Megatron's, field by field in its order, then ours."""

import math
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """What one line tells about the iterations since the last one."""

    time: datetime
    iteration: int
    train_iters: int
    consumed_samples: int
    seconds_per_iteration: float
    learning_rate: float
    """That of the next iteration, as in Megatron."""
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
    """Give the throughput where Megatron gives it too."""

    def __str__(self) -> str:
        """The line; tools that parse Megatron's logs read it up to its last two fields."""
        throughput = f"throughput per GPU (TFLOP/s/GPU): {self.tflops_per_gpu:.1f}"
        fields = [
            f"iteration {self.iteration:8d}/{self.train_iters:8d}",
            f"consumed samples: {self.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {self.seconds_per_iteration * 1000:.1f}",
            *([throughput] if self.log_throughput else []),
            f"learning rate: {self.learning_rate:.6E}",
            f"global batch size: {self.global_batch_size:5d}",
            f"lm loss: {self.lm_loss:.6E}",
            "loss scale: 1.0",
            f"grad norm: {self.grad_norm:.3f}",
            f"number of skipped iterations: {self.skipped_iterations:3d}",
            f"number of nan iterations: {self.nan_iterations:3d}",
            f"tokens/s/GPU: {self.tokens_per_second_per_gpu:.1f}",
            f"model TFLOP/s/GPU: {self.tflops_per_gpu:.3f}",
            f"peak memory: {self.peak_device_bytes / 2**30:.3f} GiB",
        ]
        return f" [{self.time:%Y-%m-%d %H:%M:%S}] " + " | ".join(fields) + " |"


def evaluation_line(iteration: int, loss: float) -> str:
    """Megatron's line after an evaluation; its perplexity stops growing at a loss of 20."""
    return (
        f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | "
        f"lm loss PPL: {math.exp(min(20, loss)):.6E} |"
    )
