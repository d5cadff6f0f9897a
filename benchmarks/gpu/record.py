"""What a part found: tables and problems, kept in a file that is complete after every row."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Record:
    """Tables by title, each a list of rows by column, and expectations that were not met."""

    path: Path
    """JSON; written after every row, so that a part that is ended keeps what it measured."""
    budget_seconds: float
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        """Seconds left of the budget."""
        return self.budget_seconds - (time.monotonic() - self._began)

    def row(self, table: str, **cells: Any) -> None:
        """Add a row to a table and print it; numbers keep all digits in JSON."""
        self.tables.setdefault(table, []).append(cells)
        print(
            "   ", ", ".join(f"{name} {shown(value)}" for name, value in cells.items()), flush=True
        )
        self._write()

    def expect(self, holds: bool, problem: str) -> None:
        """Note ``problem`` unless ``holds``."""
        if not holds:
            self.problems.append(problem)
            print(f"    PROBLEM: {problem}", flush=True)
        self._write()

    def _write(self) -> None:
        content = {"tables": self.tables, "problems": self.problems}
        # Replaced at once: the process may be killed at any moment, and what is there is read then.
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(unfinished, self.path)


def shown(value: Any) -> str:
    """A cell: three significant digits, or as many as a large number has."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def markdown(table: list[dict[str, Any]]) -> str:
    """A table in Markdown; its columns are those of all rows in order of appearance."""
    columns = list(dict.fromkeys(name for row in table for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(shown(row.get(c)) for c in columns) + " |" for row in table]
    return "\n".join(lines)
