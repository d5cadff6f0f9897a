"""The console of a run: log lines, and a progress bar or progress lines with an ETA."""

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class ProgressConsole:
    """Prints lines. A terminal also gets a bar below them, other outputs get progress lines."""

    def __init__(self, *, start: int, total: int, console: Console | None = None):
        self._console = console or Console()
        self._start, self._total = start, total
        self._began = time.monotonic()
        self.bar = Progress(
            "iteration",
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            "ETA",
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        """A context: enter it to show the bar. Its thread redraws it below the lines."""
        self._task = self.bar.add_task("train", completed=start, total=total)

    def print(self, line: str) -> None:
        """Print one line as it is, without markup, and flush."""
        # soft_wrap: the console would otherwise break lines at 80 columns in a log file.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def advance(self, iteration: int) -> None:
        """Move the bar to ``iteration``; no effect without a terminal."""
        self.bar.update(self._task, completed=iteration)

    def report(self, iteration: int) -> None:
        """Print progress and ETA in a line; no effect on a terminal, which has the bar."""
        if not self._console.is_terminal:
            elapsed = time.monotonic() - self._began
            self.print(
                progress_line(
                    start=self._start, iteration=iteration, total=self._total, elapsed=elapsed
                )
            )


def progress_line(*, start: int, iteration: int, total: int, elapsed: float) -> str:
    """The line for a run that started at iteration ``start``, with an ETA at a constant pace.

    Args:
        start: iterations done before this run.
        iteration: iterations done now; above ``start``.
        total: iterations of the run.
        elapsed: seconds since ``start``.
    """
    eta = elapsed / (iteration - start) * (total - iteration)
    passed, left = timedelta(seconds=round(elapsed)), timedelta(seconds=round(eta))
    done = f"{iteration}/{total} ({iteration / total:.1%})"
    return f" progress: {done} | elapsed: {passed} | ETA: {left} |"
