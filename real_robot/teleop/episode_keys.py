"""Keys that end, keep and discard the episodes of a recording, as in LeRobot's record command."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import tty
from contextlib import suppress
from typing import Any, Literal, Self

Key = Literal["", "next", "discard", "stop"]
HINT = "right arrow: end and keep; left arrow: discard; Esc: keep, and stop recording"
KEYS: dict[bytes, Key] = {
    b"\x1b[C": "next",
    b"\x1bOC": "next",
    b"\x1b[D": "discard",
    b"\x1bOD": "discard",
    b"\x1b": "stop",
}
ONE = re.compile(rb"\x1b(?:\[[0-9;]*[ -~]|O[ -~])?|.", re.DOTALL)


class EpisodeKeys:
    """Of this process's terminal, as a context; without one (or in its background) none is ever
    pressed. Ctrl-C works as before."""

    def __init__(self, file: int | None = None) -> None:
        self.file = sys.stdin.fileno() if file is None else file
        self.there = os.isatty(self.file) and os.tcgetpgrp(self.file) == os.getpgrp()
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        if self.there:
            self._before = termios.tcgetattr(self.file)
            tty.setcbreak(self.file, termios.TCSAFLUSH)
        return self

    def pressed(self) -> Key:
        """The newest key since the last call; never waits."""
        key: Key = ""
        while self.there and select.select([self.file], [], [], 0)[0]:
            try:
                typed = os.read(self.file, 64)
            except OSError:  # the terminal is gone
                typed = b""
            if not typed:
                self.there = False
            key = keys(typed) or key
        return key

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            with suppress(termios.error):
                termios.tcsetattr(self.file, termios.TCSAFLUSH, self._before)
            self._before = None


def keys(typed: bytes) -> Key:
    """The last of the keys in what a terminal sent: an escape alone, or an arrow, which is an
    escape with more behind it, as other keys are that mean nothing here."""
    found: list[bytes] = ONE.findall(typed)
    known: list[Key] = [KEYS[each] for each in found if each in KEYS]
    return known[-1] if known else ""
