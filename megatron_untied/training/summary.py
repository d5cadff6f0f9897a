"""What a run has achieved and where its results are, told at its end."""

import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from megatron_untied.checkpoint import Progress
from megatron_untied.training.config import RunConfig


@dataclass(kw_only=True, slots=True)
class RunSummary:
    """Updated as a run goes on; its text is the block at the end."""

    config: RunConfig
    start: Progress
    """What the run began from."""
    progress: Progress
    """How far it is."""
    checkpoint: Path | None
    """The last one that was saved, or else the one that was loaded."""
    step_seconds: float = 0.0
    """Of all optimizer steps."""
    train_loss: float | None = None
    validation: tuple[int, float] | None = None
    """Iteration and loss of the last evaluation."""
    _began: float = field(default_factory=time.monotonic)

    def resume_advice(self) -> str:
        """The last checkpoint, and how to continue from it."""
        if self.checkpoint is None:
            lost = self.progress.iteration - self.start.iteration
            remedy = (
                "--save-interval saves more often" if self.config.checkpoint.save else "give --save"
            )
            return f"no checkpoint was saved ({lost} iterations are lost); {remedy}"
        return f"the last checkpoint is {self.checkpoint}; --load {self.checkpoint.parent} resumes"

    def __str__(self) -> str:
        """A line for each of: iterations, losses, tokens, and the places that are in use."""
        config = self.config
        iterations = self.progress.iteration - self.start.iteration
        tokens = iterations * config.batch.tokens
        elapsed = timedelta(seconds=round(time.monotonic() - self._began))
        lines = [
            f"iterations: {self.progress.iteration} of {config.loop.train_iters}, "
            f"{iterations} of them in this run"
        ]
        if self.train_loss is not None:
            lines.append(f"train loss: {self.train_loss:.6f}")
        if self.validation is not None:
            iteration, loss = self.validation
            lines.append(f"validation loss: {loss:.6f} (iteration {iteration})")
        speed = f" ({tokens / self.step_seconds:,.0f} tokens/s)" if self.step_seconds else ""
        trained = timedelta(seconds=round(self.step_seconds))
        lines.append(f"tokens: {tokens:,} in {trained} of training{speed}; {elapsed} in all")
        lines.append(f"checkpoint: {self.resume_advice()}")
        places = {
            "TensorBoard": config.logging.tensorboard_dir,
            "metrics": config.logging.metrics_jsonl,
            "Weights & Biases": config.logging.wandb_project,
        }
        lines += [f"{name}: {place}" for name, place in places.items() if place]
        return "\n".join(["summary", *(f"  {line}" for line in lines)])
