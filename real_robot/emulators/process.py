"""An emulator in a process of its own, which ends with the process that started it.

The last part is the emulator's side: settings in, reply out, pacing of simulation steps, and a
pseudo-terminal.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tty
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from embodied.core.build import Node, build, parse
from embodied.core.children import module_command
from embodied.real_robot.daemon.child import last_words
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.mailbox import memory_folder

PATIENCE = 60.0  # s until it is there, on a machine that does much else
ANSWER = 5.0  # s
PREFIX = "embodied-emulator-"  # of the folder of an emulator


class Emulator(ABC):
    """A simulated robot that is started before the daemon: the role of `robot.emulator`."""

    @abstractmethod
    def start(self) -> dict[str, Any]:
        """Settings for the driver. DriverError where it does not come up."""

    @abstractmethod
    def behind(self) -> float:
        """s that its world has lost to real time so far. DriverError."""

    @abstractmethod
    def stop(self) -> None:
        """End it; safe to call twice."""


def clear_left() -> None:
    """Take away the folders of emulators that were killed together with their starters: no process
    has the lock on their logs any more."""
    for folder in memory_folder().glob(f"{PREFIX}*"):
        with suppress(OSError), (folder / "log").open("rb") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


class Process(Emulator):
    """`python -m module FOLDER` reads `config` (a dataclass) as a line of JSON from its standard
    input, answers with a line of settings for the driver, and then does what `answer` says. The
    folder is its own, in memory, and goes when it does; `name` is for people."""

    def __init__(self, module: str, config: Any, name: str) -> None:
        self.module = module
        self.settings = asdict(config)
        self.name = name
        self.process: subprocess.Popen[str] | None = None
        self.folder = Path()

    def start(self) -> dict[str, Any]:
        self.stop()
        clear_left()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=memory_folder()))
        self.log = (self.folder / ".log").open("wb")
        fcntl.flock(self.log, fcntl.LOCK_EX)  # the emulator's too: it gets the open file
        (self.folder / ".log").rename(self.folder / "log")
        self.process = subprocess.Popen(
            module_command(self.module, str(self.folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,  # Ctrl-C is for its starter, which ends it in order
        )
        try:
            return self._ask(json.dumps(self.settings), PATIENCE, "did not start")
        except DriverError:
            self.stop()
            raise

    def behind(self) -> float:
        return float(self._ask("", ANSWER, "does not answer")["behind"])

    def stop(self) -> None:
        if self.process is None:
            return
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()
        self.process = None
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """0 where it does not run."""
        return 0 if self.process is None or self.process.poll() is not None else self.process.pid

    def _ask(self, line: str, patience: float, problem: str) -> dict[str, Any]:
        process = self.process
        deadline = time.monotonic() + patience
        assert process is not None and process.stdin is not None and process.stdout is not None
        with suppress(OSError):  # one that is gone is told of below
            process.stdin.write(line + "\n")
            process.stdin.flush()
        while process.poll() is None and time.monotonic() < deadline:
            if select.select([process.stdout], [], [], 0.1)[0] and (
                said := process.stdout.readline()  # empty: it has ended
            ):
                return json.loads(said)
        words = last_words(self.folder / "log")
        raise DriverError(f"the emulator of the {self.name} {problem}{': ' * bool(words)}{words}")


class SharedEmulator:
    """Runs from the first `at` of its node to the `close` of its last user. `settings`: for the
    driver."""

    known: ClassVar[dict[str, SharedEmulator]] = {}

    @classmethod
    def at(cls, node: Node) -> SharedEmulator:
        """The emulator of `node`, running. DriverError where it does not come up."""
        key = json.dumps(node, sort_keys=True)
        if key not in cls.known:
            cls.known[key] = cls(key, build(node, Emulator))
        shared = cls.known[key]
        shared.users += 1
        return shared

    def __init__(self, key: str, emulator: Emulator) -> None:
        self.key = key
        self.emulator = emulator
        self.users = 0
        self.settings: dict[str, Any] = emulator.start()

    def close(self) -> None:
        self.users -= 1
        if not self.users:
            del self.known[self.key]
            self.emulator.stop()


@dataclass(frozen=True)
class Config:
    """Settings of several emulators."""

    robots: dict[str, Node]  # node of each robot's emulator, by its prefix


class JoinedEmulators(Emulator):
    """Started and stopped together."""

    def __init__(self, config: Config) -> None:
        self.parts = {name: build(node, Emulator) for name, node in config.robots.items()}

    def start(self) -> dict[str, Any]:
        """The settings of each robot's driver, under `more`."""
        try:
            return {"more": {name: part.start() for name, part in self.parts.items()}}
        except BaseException:
            self.stop()
            raise

    def behind(self) -> float:
        return max(part.behind() for part in self.parts.values())

    def stop(self) -> None:
        for part in self.parts.values():
            part.stop()


S = TypeVar("S")


def settings(kind: type[S]) -> S:
    """The dataclass `kind`, from the first line of standard input."""
    return parse(kind, json.loads(sys.stdin.readline()), "emulator")


def answer(
    said: dict[str, Any],
    behind: Callable[[], float] = lambda: 0.0,
    over: threading.Event | None = None,
) -> None:
    """Tell `said`, and then to every line of standard input how far `behind` real time its world is
    (s), until the input ends: that is `over`, and the folder goes, as its starter may be dead."""
    try:
        print(json.dumps(said), flush=True)
        while os.read(0, 256):  # not sys.stdin: a thread in it would spoil the process's last words
            print(json.dumps({"behind": behind()}), flush=True)
        if Path(sys.argv[1]).name.startswith(PREFIX):  # not where a person has started it
            shutil.rmtree(sys.argv[1], ignore_errors=True)
    finally:
        if over is not None:
            over.set()


def loopback_address() -> str:
    """An address of this machine that nobody else is likely to have."""
    return "127." + ".".join(str(1 + secrets.randbelow(254)) for _ in range(3))


class Pace:
    """When the next step of `step` s is `due` (s, monotonic). Up to `most` s are caught up with;
    the world goes on later by the rest."""

    def __init__(self, step: float, most: float = math.inf) -> None:
        self.step = step
        self.most = most
        self.due = time.monotonic()
        self.lost = 0.0

    def next(self) -> float:
        """After a step: s until the next one."""
        now = time.monotonic()
        self.due += self.step
        late = max(0.0, now - self.due - self.most)
        self.due += late
        self.lost += late
        return max(0.0, self.due - now)

    def behind(self) -> float:
        """s that this world has lost so far."""
        return self.lost + max(0.0, time.monotonic() - self.due)


class PtyDevice(ABC):
    """As a context: a device on a pseudo-terminal, played by a thread; `path` is for its client.
    After `pause` s without a byte its `turn` comes too."""

    pause: ClassVar[float]

    def __enter__(self) -> Self:
        self._file, self._slave = pty.openpty()
        tty.setraw(self._file)
        tty.setraw(self._slave)
        self.path = os.ttyname(self._slave)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.unplug()

    def unplug(self) -> None:
        """The cable is pulled: the client's port goes away. Safe to call twice."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            os.close(self._slave)
            os.close(self._file)

    def send(self, data: bytes) -> None:
        """Send `data` to the client."""
        os.write(self._file, data)

    @abstractmethod
    def turn(self, data: bytes) -> None:
        """Take the client's `data`, empty where there are none, and do what is due."""

    def _run(self) -> None:
        while not self._over.is_set():
            ready = select.select([self._file], [], [], self.pause)[0]
            self.turn(os.read(self._file, 4096) if ready else b"")
