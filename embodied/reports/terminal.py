"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def print_rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; where it is too narrow for its words and numbers, as plain columns."""
    lines = [heads, *rows]
    columns = [*zip(*lines, strict=True)]
    console = Console(markup=False, highlight=False)
    words = [[len(word) for cell in column for word in cell.split()] for column in columns]
    if sum(max(lengths, default=0) + 3 for lengths in words) < console.width:  # 3: the frame
        table = Table(*heads)
        for row in lines[1:]:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(map(len, column)) for column in columns]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())
