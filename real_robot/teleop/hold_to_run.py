"""Hold-to-run: the arm moves only while an operator holds a key, a button or a pedal; and the keys
of the terminal.

A thread of the operator's terminal looks at the device and writes a beat into the mailbox `deadman`
of the daemon's folder each time it finds it held. The control process brings the arm to rest when
no beat has come for 0.25 s (`embodied.real_robot.kernel.checks`), whatever the reason: let go, the
device unplugged, the terminal stopped or closed.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import select
import struct
import sys
import termios
import threading
import time
import tty
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np

from embodied.core.bounds import Bound
from embodied.core.build import ConfigError, Node, build
from embodied.real_robot.kernel.mailbox import Mailbox, MailboxError
from embodied.real_robot.kernel.messages import DEADMAN, HEARTBEAT, VERSION

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
        return self.there and os.tcgetpgrp(self.file) == os.getpgrp()

    def begin(self) -> None:
        if self.readers:
            raise ConfigError("two parts of this program want the terminal's keys: leave one out")
        self.readers.add(self.file)
        before = termios.tcgetattr(self.file)
        # Also at the end of this process, be it an actor's.
        self._restore = Finalize(self, restore, (self.file, before), exitpriority=0)
        tty.setcbreak(self.file, termios.TCSAFLUSH)

    def read(self, wait: float = 0.0) -> bytes | None:
        """The typed keys, after up to `wait` s for a first one; None: the terminal is gone."""
        if not select.select([self.file], [], [], wait)[0]:
            return b""
        try:
            return os.read(self.file, 1024) or None
        except OSError:
            return None

    def forget(self) -> None:
        with suppress(termios.error):
            termios.tcflush(self.file, termios.TCIFLUSH)

    def close(self) -> None:
        if self._restore is not None:
            self._restore()
            self._restore = None
        if self.ours is not None:
            os.close(self.ours)
            self.file = -1
            self.ours = None


def restore(file: int, before: list[Any]) -> None:
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
    ever pressed. `used` is False where the device reads the terminal itself."""

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


class OperatorThread(ABC):
    """A thread of the operator's terminal: looks at a device, writes into the daemon's folder.

    The device is opened at once (an error is raised), and looked at from `start` on. As a context:
    until its end. One thread opens and reads it: a gamepad's library insists on that.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.problem: Exception | None = None
        self._folder: Path | None = None
        self._opened = threading.Event()
        self._go = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._opened.wait()
        if self.problem is not None:
            raise self.problem

    def start(self, folder: Path) -> None:
        """Start for the daemon in `folder`; an error is raised."""
        self._folder = folder
        self._opened.clear()
        self._go.set()
        self._opened.wait()
        if self.problem is not None:
            raise self.problem

    @abstractmethod
    def _work(self) -> Generator[None, Path]:
        """Open the device; yield for the daemon's folder, begin to read the device, and yield again
        before each look, which waits a moment. Closed at the end. ConfigError before the looks."""

    def _run(self) -> None:
        work = self._work()
        try:
            next(work)
        except Exception as error:  # it is raised in the thread that waits
            self.problem = error
            return
        finally:
            self._opened.set()
        with closing(work):
            self._go.wait()
            if self._folder is None or self._done.is_set():
                return
            try:
                work.send(self._folder)
            except Exception as error:
                self.problem = error
                return
            finally:
                self._opened.set()
            while not self._done.is_set():
                next(work)

    def close(self) -> None:
        """Safe to call twice."""
        self._done.set()
        self._go.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DaemonMailbox:
    """A mailbox of the daemon's folder, which a daemon that starts again makes anew."""

    def __init__(self, path: Path, dtype: np.dtype[Any], write: bool = False) -> None:
        self.path = path
        self.dtype = dtype
        self.write = write
        self.file = -1
        self.mailbox: Mailbox | None = None

    def newest(self) -> Mailbox | None:
        """The one that is there now; None where no daemon runs."""
        with suppress(OSError, MailboxError):
            file = os.stat(self.path).st_ino
            if self.mailbox is None or file != self.file:
                self.close()
                self.mailbox = Mailbox(self.path, self.dtype, VERSION, False, self.write)
                self.mailbox.receive()  # its count goes on
                self.file = file
            return self.mailbox
        return None

    def close(self) -> None:
        if self.mailbox is not None:
            self.mailbox.close()
        self.mailbox = None


LOOK = 0.02  # s between two looks at a button
EVENT = struct.Struct("@llHHi")  # struct input_event of <linux/input.h>
SYN = 0
KEY = 1
DROPPED = 3
SPACE: Node = {"_target_": "embodied.real_robot.teleop.hold_to_run.TerminalKey"}


class DeviceFile:
    """A file that a device writes to. ConfigError with `hint` where it cannot be read."""

    def __init__(self, path: str, what: str, hint: str) -> None:
        try:
            self.file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise ConfigError(
                f"the {what} {path} cannot be read ({error.strerror}): {hint}"
            ) from error

    def fileno(self) -> int:
        return self.file

    def read(self, size: int, hear: Callable[[bytes], None]) -> bool:
        """Let `hear` have all that is there; False where the device is gone."""
        try:
            while data := os.read(self.file, size):
                hear(data)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        os.close(self.file)


class HoldDevice(ABC):
    """A device that an operator holds. All calls come from one thread."""

    hint: str  # words for what the operator has to do: "hold ..."

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


class InputKey(HoldDevice):
    """A foot pedal, button or key of a Linux input device: pressed and let go are said by the
    kernel. Held only after a press that was seen, and no longer once an event was lost."""

    def __init__(self, config: InputKeyConfig) -> None:
        self.config = config
        self.down = False
        self.hint = f"hold key {config.code} of {config.path} down"
        hint = "see /dev/input/by-id, and who may read it (group input)"
        self.file = DeviceFile(config.path, "input device", hint)

    def begin(self) -> None:
        """Begin to read; keys that were pressed before do not count."""
        self.file.read(64 * EVENT.size, self._hear)
        self.down = False

    def held(self) -> bool:
        select.select([self.file], [], [], LOOK)
        if not self.file.read(64 * EVENT.size, self._hear):
            self.down = False
            time.sleep(LOOK)
        return self.down

    def _hear(self, data: bytes) -> None:
        for _, _, kind, code, value in EVENT.iter_unpack(
            data[: len(data) // EVENT.size * EVENT.size]
        ):
            if kind == KEY and code == self.config.code:
                self.down = value != 0  # 1 pressed, 2 repeated, 0 let go
            elif kind == SYN and code == DROPPED:
                self.down = False

    def close(self) -> None:
        self.file.close()


def beat(beats: DaemonMailbox, now: float) -> None:
    """Send a beat of `now` (s, monotonic). Nothing happens where no daemon runs."""
    if (mailbox := beats.newest()) is not None:
        mailbox.fields["count"] += 1
        mailbox.fields["time"] = now
        mailbox.send()


class HoldToRun(OperatorThread):
    """The device `node` (None: the space bar), while an operator holds it."""

    def __init__(self, node: Node | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.node = SPACE if node is None else node
        self.last = -1e9
        super().__init__(clock)

    @property
    def held(self) -> bool:
        """Whether a beat was written in the last quarter of a second."""
        return self.clock() - self.last <= 0.25

    def _work(self) -> Generator[None, Path]:
        with closing(build(self.node, HoldDevice)) as device:
            self.hint = device.hint
            folder = yield
            device.begin()
            with closing(DaemonMailbox(folder / DEADMAN, HEARTBEAT, write=True)) as beats:
                while True:
                    yield
                    if device.held():
                        self.last = self.clock()
                        beat(beats, self.last)
