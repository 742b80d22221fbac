"""Says how far an evaluation is, which may take minutes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

TERMINAL = 1.0  # s between two reports on a terminal
PLAIN = 30.0  # s between two lines of a log


def counting(total: int) -> Callable[[int], None]:
    """A function to call with the number of finished episodes of `total`: it prints it to standard
    error, on a terminal always in the same line, which is empty in the end."""
    terminal = sys.stderr.isatty()
    every = TERMINAL if terminal else PLAIN
    shown = time.monotonic()

    def show(done: int) -> None:
        nonlocal shown
        over = terminal and done >= total
        if over or time.monotonic() - shown > every:
            shown = time.monotonic()
            line = "" if over else f"{done} of {total} episodes"
            start, end = ("\r\x1b[K", "") if terminal else ("", "\n")
            print(f"{start}{line}", end=end, file=sys.stderr, flush=True)

    return show
