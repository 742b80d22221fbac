"""Keys that end, keep and discard the episodes of a recording, as in LeRobot's record command."""

from __future__ import annotations

import re
from typing import Literal, Self

from embodied.real_robot.teleop.terminal import Terminal

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
