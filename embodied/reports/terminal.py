"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def print_rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with frames; long cells go on below."""
    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)
