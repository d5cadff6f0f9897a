"""Tables of numbers that stay whole at any width: on a terminal, in a log file, in a pager."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_BORDER = 3
"""Characters between two columns: the line and a space on each side of it."""
_LABEL_PART = 3
"""A label is folded where it would take more than one part in so many of the width."""


def print_table(
    console: Console, title: str, label: str, columns: Sequence[str], rows: Mapping[str, Sequence]
) -> None:
    """Print ``rows``, by label one cell for each of ``columns``, as wide as ``console`` is.

    Columns that do not fit beside each other follow below in a table of their own, with the labels
    repeated. A cell is never cut or folded; labels and headers are folded between words.
    """
    cells = {name: [str(cell) for cell in row] for name, row in rows.items()}
    folded = [_longest_word(header) for header in columns]
    numbers = [max(map(len, column)) for column in zip(*cells.values(), strict=True)]
    labels = [label, *cells]
    label_width = min(
        max(map(len, labels)), max(console.width // _LABEL_PART, *map(_longest_word, labels))
    )
    room = console.width - label_width - _BORDER - 1
    for headers in (map(len, columns), folded):  # headers are folded only where there is no room
        widths = list(map(max, headers, numbers))
        groups = _side_by_side(widths, room)
        if len(groups) == 1:
            break
    for number, group in enumerate(groups):
        part = f" ({number + 1} of {len(groups)})" if len(groups) > 1 else ""
        whole = label_width + sum(widths[place] + _BORDER for place in group) + _BORDER + 1
        table = Table(title=title + part, title_justify="left", width=whole)
        table.add_column(label, width=label_width)
        for place in group:
            table.add_column(columns[place], justify="right", width=widths[place])
        for name, row in cells.items():
            table.add_row(Text(name), *(Text(row[place]) for place in group))
        # On a console that is narrower than two columns a line is too long rather than cut.
        console.print(table, crop=False)


def print_line(console: Console, line: str) -> None:
    """Print one line as it is: a terminal wraps it, and a log keeps it whole."""
    console.print(line, soft_wrap=True, markup=False)


def _side_by_side(widths: Sequence[int], room: int) -> list[list[int]]:
    """Places of columns in groups of at most ``room`` characters; at least one in each."""
    groups: list[list[int]] = [[]]
    taken = 0
    for place, width in enumerate(widths):
        if groups[-1] and taken + width + _BORDER > room:
            groups.append([])
            taken = 0
        groups[-1].append(place)
        taken += width + _BORDER
    return groups


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)
