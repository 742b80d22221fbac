"""Terminal: the keys of this process's terminal, one by one, for one reader at a time; among them
those that end, keep and discard the episodes of a recording, as in LeRobot's record command.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import select
import sys
import termios
import tty
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any, ClassVar, Literal, Self

from embodied.core.build import ConfigError

TERMINAL = "/dev/tty"


class Terminal:
    """Opened by `begin`: keys come at once from then on, and are not shown; Ctrl-C works as before.

    `file`: of the terminal (None: this process's own). An actor process, whose standard input is
    empty, has the terminal of its learner.
    """

    readers: ClassVar[set[int]] = set()  # files that are read at present

    def __init__(self, file: int | None = None) -> None:
        self.ours: int | None = None  # a file that `close` closes
        self.file = self._own() if file is None else file
        self._restore: Finalize | None = None

    def _own(self) -> int:
        if mp.parent_process() is None:
            return sys.stdin.fileno()
        with suppress(OSError):  # there is none
            self.ours = os.open(TERMINAL, os.O_RDWR | os.O_NOCTTY)
        return -1 if self.ours is None else self.ours

    @property
    def there(self) -> bool:
        return self.file >= 0 and os.isatty(self.file)

    @property
    def foreground(self) -> bool:
        """Whether this process is the one that is typed to."""
        return self.there and os.tcgetpgrp(self.file) == os.getpgrp()

    def begin(self) -> None:
        """ConfigError where something else reads its keys."""
        if self.readers:
            raise ConfigError("two parts of this program want the terminal's keys: leave one out")
        self.readers.add(self.file)
        before = termios.tcgetattr(self.file)
        # Also at the end of this process, be it an actor's.
        self._restore = Finalize(self, restore, (self.file, before), exitpriority=0)
        tty.setcbreak(self.file, termios.TCSAFLUSH)

    def read(self, wait: float = 0.0) -> bytes | None:
        """Read the typed keys, after up to `wait` s for a first one; None where the terminal is
        gone."""
        if not select.select([self.file], [], [], wait)[0]:
            return b""
        try:
            return os.read(self.file, 1024) or None
        except OSError:
            return None

    def forget(self) -> None:
        """Drop what was typed and not read."""
        with suppress(termios.error):
            termios.tcflush(self.file, termios.TCIFLUSH)

    def close(self) -> None:
        """Set the terminal back to how it was before `begin`."""
        if self._restore is not None:
            self._restore()
            self._restore = None
        if self.ours is not None:
            os.close(self.ours)
            self.file = -1
            self.ours = None


def restore(file: int, before: list[Any]) -> None:
    """Give the terminal its settings back, where it is still there."""
    Terminal.readers.discard(file)
    with suppress(termios.error):
        termios.tcsetattr(file, termios.TCSAFLUSH, before)


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
    """Keys of this process's terminal, as a context; without one (or in its background) none is
    ever pressed. Ctrl-C works as before. `used` is False where the device reads the terminal
    itself."""

    def __init__(self, file: int | None = None, used: bool = True) -> None:
        self.terminal = Terminal(file)
        self.there = used and self.terminal.foreground

    def __enter__(self) -> Self:
        if self.there:
            self.terminal.begin()
        return self

    def pressed(self) -> Key:
        """The newest key since the last call; never waits."""
        key: Key = ""
        while self.there and (typed := self.terminal.read()) != b"":
            self.there = typed is not None
            key = keys(typed or b"") or key
        return key

    def __exit__(self, *_: object) -> None:
        self.terminal.close()


def keys(typed: bytes) -> Key:
    """The last of the keys in what a terminal sent: an escape alone, or an arrow, which is an
    escape with more behind it, as other keys are that mean nothing here."""
    found: list[bytes] = ONE.findall(typed)
    known: list[Key] = [KEYS[each] for each in found if each in KEYS]
    return known[-1] if known else ""
