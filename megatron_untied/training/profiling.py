"""Traces of training steps by PyTorch's profiler: a file per rank, which Perfetto opens."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.profiler import profile, record_function

from megatron_untied.config.run import RunConfig
from megatron_untied.step_progress import StepProgress


class StepProfiler(contextlib.AbstractContextManager):
    """Traces the iterations of ``config.profiling`` on this rank.

    Leaving the context writes a trace that an early exit has cut short. After an error nothing is
    written: its ranges have no end, and the other ranks wait for this one to exit.
    """

    def __init__(
        self, config: RunConfig, rank: int, progress: StepProgress, *, say: Callable[[str], None]
    ):
        """``progress`` names the ranges; ``say`` prints a line on rank 0."""
        self._config, self._rank, self._progress, self._say = config, rank, progress, say
        self._profile: profile | None = None
        self._traced: list[int] = []

    @contextlib.contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Trace the code inside if ``iteration`` is to be traced on this rank."""
        profiling = self._config.profiling
        if iteration not in profiling.iterations:
            yield
            return
        if self._profile is None and self._rank in profiling.profile_ranks:
            self._profile = profile(record_shapes=True)
            self._profile.start()
        self._traced.append(iteration)
        self._progress.profiling = self._profile is not None
        with record_function(f"iteration {iteration}"):
            yield
        self._progress.profiling = False
        if iteration == profiling.iterations[-1]:
            self._write()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and self._traced:
            self._write()

    def _write(self) -> None:
        folder, traced = Path(self._config.logging.tensorboard_dir), self._traced
        iterations = f"iterations-{traced[0]}-{traced[-1]}"
        if self._profile is not None:
            self._profile.stop()
            name = f"rank{self._rank}-{iterations}.pt.trace.json.gz"
            self._profile.export_chrome_trace(str(folder / name))
        ranks = ", ".join(map(str, self._config.profiling.profile_ranks))
        self._say(f"traces: {folder}/rank*-{iterations}.pt.trace.json.gz of ranks {ranks}")
        self._profile, self._traced = None, []
