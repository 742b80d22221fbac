"""Operators of commands: a command on a pseudo-terminal with who types there, and a SpaceMouse."""

from __future__ import annotations

import os
import pty
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.real_robot.test_daemon import in_mode, until
from tests.real_robot.test_deploy import ENV, PATIENTLY


class Hand:
    """A SpaceMouse that is a pipe, and who moves it."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path, self.pipe = path, os.open(path, os.O_RDWR)

    @property
    def words(self) -> tuple[str, str]:
        return "teleop=spacemouse", f"teleop.device.path={self.path}"

    def push(self, x: int, y: int, z: int) -> None:
        os.write(self.pipe, struct.pack("<B6h", 1, x, y, z, 0, 0, 0))

    def press(self, buttons: int) -> None:
        os.write(self.pipe, bytes([3, buttons]))


class Operator:
    """`embodied WORDS` for the daemon in `folder`, on a pseudo-terminal whose `text` is read.
    `space`: the space bar is kept down, at 30 characters a second."""

    def __init__(self, where: Path, folder: Path, *words: str) -> None:
        self.folder, self.text, self.space = folder, b"", threading.Event()
        self.file, slave = pty.openpty()
        command = [sys.executable, "-m", "embodied.cli", *words, *PATIENTLY, f"folder={folder}"]
        # With fork, a pseudo-terminal would be no controlling one.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *command],
            cwd=where,
            env=ENV,
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        self.done = threading.Event()
        self.threads = [threading.Thread(target=run) for run in (self._type, self._read)]
        for thread in self.threads:
            thread.start()

    def _type(self) -> None:
        while not self.done.wait(0.033):
            if self.space.is_set():
                os.write(self.file, b" ")

    def _read(self) -> None:
        while True:
            try:
                self.text += os.read(self.file, 4096)
            except OSError:  # the other side is closed
                return

    def types(self, key: bytes) -> None:
        os.write(self.file, key)

    def says(self, words: str, times: int = 1) -> None:
        def so() -> bool:
            found = self.text.count(words.encode()) >= times
            assert found or self.process.poll() is None, self.text.decode()
            return found

        until(so, f"it says {words!r} {times} times")

    def rehearses(self) -> None:
        """Say yes to each of the five joints of a new calibration."""
        self.says("a hand is on its own stop. Go on?")
        self.types(b"y\n")
        for number in range(1, 6):
            self.says("Did the", times=number)
            self.types(b"y\n")

    def mode(self, name: str) -> dict[str, Any]:
        return until(lambda: in_mode(self.folder, name), f"it is {name}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.done.set()
        self.threads[0].join()
        os.close(self.file)
        self.threads[1].join()
