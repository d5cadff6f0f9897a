"""What happens to documents that cannot be read or encoded: ``--on-bad-line``."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TextIO

from megatron_untied.data.documents import Place

POLICIES = ("error", "skip", "replace")
_LINES_KEPT = 20


class CheckedDocument(Protocol):
    """A document as it was read or encoded."""

    place: Place
    problem: str | None
    replaced: str | None


class BadLines:
    """Decides about each document, and keeps count with the places of bad ones.

    All places go to the file ``report``, which exists only if there is one; memory holds the first
    few of them. A run that is resumed appends to it.
    """

    def __init__(self, policy: str, report: Path | None = None, *, resume: bool = False):
        self.replace = policy == "replace"
        self.num_skipped = self.num_replaced = 0
        self._policy = policy
        self._report, self._mode = report, "a" if resume else "w"
        self._file: TextIO | None = None
        self._first: list[str] = []

    @staticmethod
    def add_flag(parser: argparse.ArgumentParser) -> None:
        """The flag of every tool that reads documents."""
        parser.add_argument(
            "--on-bad-line",
            choices=POLICIES,
            default="error",
            help="a document that cannot be read or encoded ends the run (error), is left out "
            "(skip), or what is no text in it becomes U+FFFD (replace; left out if that does not "
            "help). Counts and line numbers are printed at the end",
        )

    def accepts(self, document: CheckedDocument) -> bool:
        """Whether the document has text; one that does not is counted.

        Raises:
            ValueError: it has none, and the policy is to end there.
        """
        if document.problem:
            if self._policy == "error":
                raise ValueError(
                    f"{document.place}: {document.problem}. --on-bad-line skip leaves such "
                    "documents out, replace puts U+FFFD for what is no text"
                )
            self.num_skipped += 1
            self._note(f"{document.place}: left out: {document.problem}")
        elif document.replaced:
            self.num_replaced += 1
            self._note(f"{document.place}: replaced by U+FFFD: {document.replaced}")
        return not document.problem

    def summary(self) -> Iterator[str]:
        """Lines for the end of a run; none if there was no bad document."""
        if self._file:
            self._file.close()
        num_bad = self.num_skipped + self.num_replaced
        if num_bad:
            places = f"; all places are in {self._report}" if self._report else ""
            yield f"bad lines: {self.num_skipped:,} left out, {self.num_replaced:,} mended{places}"
            yield from (f"  {line}" for line in self._first)
            if num_bad > len(self._first):
                yield f"  and {num_bad - len(self._first):,} more"

    def _note(self, line: str) -> None:
        if len(self._first) < _LINES_KEPT:
            self._first.append(line)
        if self._report:
            self._file = self._file or self._report.open(self._mode, encoding="utf-8")
            self._file.write(line + "\n")
