"""Hold-to-run: the arm moves only while an operator holds a key, a button or a pedal.

A thread of the operator's terminal looks at the device and writes a beat into the mailbox `deadman`
of the daemon's folder each time it finds it held. The control process brings the arm to rest when
no beat has come for 0.25 s (`embodied.real_robot.safety.checks`), whatever the reason: let go, the
device unplugged, the terminal stopped or closed.
"""

from __future__ import annotations

import os
import select
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from embodied.core.bounds import Bound
from embodied.core.build import ConfigError, Node, build
from embodied.real_robot.ipc.messages import DEADMAN, HEARTBEAT
from embodied.real_robot.teleop.operator_thread import DaemonMailbox, OperatorThread
from embodied.real_robot.teleop.terminal import Terminal

LOOK = 0.02  # s between two looks at a button
EVENT = struct.Struct("@llHHi")  # struct input_event of <linux/input.h>
SYN = 0
KEY = 1
DROPPED = 3
SPACE: Node = {"_target_": "embodied.real_robot.teleop.hold_to_run.TerminalKey"}


class HoldDevice(ABC):
    """A device that an operator holds. All calls come from one thread."""

    hint: str
    """Words for what the operator has to do: "hold ..."."""

    @abstractmethod
    def begin(self) -> None:
        """Begin to read the device. ConfigError."""

    @abstractmethod
    def held(self) -> bool:
        """Whether it was found held since the last call; waits up to about `LOOK` s. Never raises:
        a device that is gone is not held."""

    @abstractmethod
    def close(self) -> None: ...


@dataclass(frozen=True)
class TerminalKeyConfig:
    """Settings of a key of this terminal."""

    key: str = " "  # one character
    repeat: Annotated[float, Bound(above=0.0, high=0.25)] = 0.25  # s: two in that time are held

    def __post_init__(self) -> None:
        if len(self.key) != 1 or not self.key.isascii() or not self.key.isprintable():
            raise ConfigError(f"key={self.key!r} should be one character, such as ' ' or 'h'")
        if not 0 < self.repeat <= 0.25:
            raise ConfigError(f"repeat={self.repeat:g} should be above 0, at most 0.25 s")


class TerminalKey(HoldDevice):
    """A key of this terminal, by its autorepeat: a terminal tells what is typed, not what is let
    go. A first character moves nothing, so a key that is only touched does not; the arm moves
    when the key repeats (after about half a second) and rests when it no longer does."""

    def __init__(
        self,
        config: TerminalKeyConfig,
        file: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.clock = clock
        self.terminal = Terminal(file)
        name = {" ": "the space bar"}.get(config.key, f"the key {config.key!r}")
        self.hint = f"hold {name} down"
        self.typed = self.looked = -1e9
        if not self.terminal.there:
            raise ConfigError(
                "hold_to_run: there is no terminal whose key could be held; name a button or a "
                "pedal, as in hold={_target_: embodied.real_robot.teleop.hold_to_run.InputKey, "
                "path: /dev/input/by-id/NAME, code: 48}"
            )

    def begin(self) -> None:
        """Characters come one by one from here on, and are not shown; Ctrl-C works as before."""
        if not self.terminal.foreground:
            raise ConfigError("hold_to_run: this program is not in its terminal's foreground")
        self.terminal.begin()
        self.looked = self.clock()

    def held(self) -> bool:
        # Whether the key came in the next `LOOK` s
        text = self.terminal.read(LOOK)
        if text is None:  # the terminal is gone
            time.sleep(LOOK)
        came = self.config.key.encode() in (text or b"")
        now, looked = self.clock(), self.looked
        self.looked = now
        if now - looked > self.config.repeat:  # this process was stopped: what came is old
            self.typed = -1e9
            self.terminal.forget()
            return False
        if not came:
            return False
        repeats = now - self.typed <= self.config.repeat
        self.typed = now
        return repeats

    def close(self) -> None:
        self.terminal.close()


@dataclass(frozen=True)
class InputKeyConfig:
    """Settings of a pedal, a button or a keyboard."""

    path: str  # /dev/input/by-id/..., that this user may read
    code: Annotated[int, Bound(0, 767)]  # of its key, KEY_... as evtest shows it

    def __post_init__(self) -> None:
        if not 0 <= self.code < 0x300:
            raise ConfigError(f"code={self.code} should be from 0 to 767 (`evtest` shows it)")


class InputKey(HoldDevice):
    """A foot pedal, button or key of a Linux input device: pressed and let go are said by the
    kernel. Held only after a press that was seen, and no longer once an event was lost."""

    def __init__(self, config: InputKeyConfig) -> None:
        self.config = config
        self.down = False
        self.hint = f"hold key {config.code} of {config.path} down"
        try:
            self.file = os.open(config.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise ConfigError(
                f"the input device {config.path} cannot be read ({error.strerror}): see "
                "/dev/input/by-id, and who may read it (group input)"
            ) from error

    def begin(self) -> None:
        """Begin to read; keys that were pressed before do not count."""
        self._read()
        self.down = False

    def held(self) -> bool:
        select.select([self.file], [], [], LOOK)
        if not self._read():
            self.down = False
            time.sleep(LOOK)
        return self.down

    def _read(self) -> bool:
        """Hear all events that are there; False where the device is gone."""
        with suppress(BlockingIOError):
            while True:
                try:
                    data = os.read(self.file, 64 * EVENT.size)
                except BlockingIOError:
                    raise
                except OSError:
                    return False
                if not data:
                    return False
                self._hear(data)
        return True

    def _hear(self, data: bytes) -> None:
        for _, _, kind, code, value in EVENT.iter_unpack(
            data[: len(data) // EVENT.size * EVENT.size]
        ):
            if kind == KEY and code == self.config.code:
                self.down = value != 0  # 1 pressed, 2 repeated, 0 let go
            elif kind == SYN and code == DROPPED:
                self.down = False

    def close(self) -> None:
        os.close(self.file)


class Beats:
    """Writes into the mailbox `deadman` of `folder`. A daemon that starts again makes a new one."""

    def __init__(self, folder: Path) -> None:
        self.there = DaemonMailbox(folder / DEADMAN, HEARTBEAT)

    def beat(self, now: float) -> None:
        """Send a beat of `now` (s, monotonic). Nothing happens where no daemon runs."""
        if (mailbox := self.there.newest()) is not None:
            mailbox.fields["count"] += 1
            mailbox.fields["time"] = now
            mailbox.send()

    def close(self) -> None:
        self.there.close()


class HoldToRun(OperatorThread):
    """The device `node` (None: the space bar), while an operator holds it."""

    def __init__(self, node: Node | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.node = SPACE if node is None else node
        self.last = -1e9
        self.beats: Beats | None = None
        super().__init__(clock)

    @property
    def held(self) -> bool:
        """Whether a beat was written in the last quarter of a second."""
        return self.clock() - self.last <= 0.25

    def _open(self) -> None:
        self.device = build(self.node, HoldDevice)
        self.hint = self.device.hint

    def _begin(self, folder: Path) -> None:
        self.device.begin()
        self.beats = Beats(folder)

    def _look(self) -> None:
        if self.device.held() and self.beats is not None:
            self.last = self.clock()
            self.beats.beat(self.last)

    def _close(self) -> None:
        self.device.close()
        if self.beats is not None:
            self.beats.close()
