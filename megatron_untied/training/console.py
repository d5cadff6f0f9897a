"""The console of a run: lines, and how far it is with the time that is left."""

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
    """Prints lines; on a terminal a bar stays below them, elsewhere progress is a line too."""

    def __init__(self, *, start: int, total: int, console: Console | None = None):
        self._console = console or Console()
        self._start, self._total = start, total
        self._began = time.monotonic()
        self._bar = Progress(
            "iteration",
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            "ETA",
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", completed=start, total=total)

    def __enter__(self) -> "ProgressConsole":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def print(self, line: str) -> None:
        """One line as it is, flushed."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def advance(self, iteration: int) -> None:
        """``iteration`` is done: moves the bar, where there is one."""
        self._bar.update(self._task, completed=iteration)

    def report(self, iteration: int) -> None:
        """Tell progress and ETA in a line, where there is no bar."""
        if not self._console.is_terminal:
            elapsed = time.monotonic() - self._began
            self.print(
                progress_line(
                    start=self._start, iteration=iteration, total=self._total, elapsed=elapsed
                )
            )


def progress_line(*, start: int, iteration: int, total: int, elapsed: float) -> str:
    """Progress of a run from iteration ``start``; the rest is taken to go on at the same pace."""
    eta = elapsed / (iteration - start) * (total - iteration)
    passed, left = timedelta(seconds=round(elapsed)), timedelta(seconds=round(eta))
    done = f"{iteration}/{total} ({iteration / total:.1%})"
    return f" progress: {done} | elapsed: {passed} | ETA: {left} |"
