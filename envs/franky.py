"""Franky: an FR3 that is not there, behind libfranka's own protocol on this machine.

franky-sim (MuJoCo, 1 kHz) serves the robot and its hand to the real driver, which cannot tell; the
things of a task stand before it, and what a tracker would see of them is told by shared memory.
libfranka's ports are fixed, so what is free is an address of the loopback network.
"""

from __future__ import annotations

import json
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embodied.core.build import ConfigError, Node
from embodied.embodiments import fr3
from real_robot.drivers.driver import DriverError
from real_robot.mailbox import memory_folder

SETTINGS = "settings.json"
AGE = 1.0  # s: a busy machine is no fault here
PATIENCE = 60.0  # s until it serves, on a machine that does much else


@dataclass(frozen=True)
class Config:
    """`world`: what stands on the table (none: nothing does); `host`: an address of 127.0.0.0/8
    (none: a free one); `q` (rad) and `width` (m): where the arm begins."""

    world: Node | None = None
    host: str = ""
    q: tuple[float, ...] = tuple(float(each) for each in fr3.HOME)
    width: float = fr3.OPEN
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.q) != len(fr3.JOINTS):
            raise ConfigError("q: 7 joint positions please")
        if self.host and not self.host.startswith("127."):
            raise ConfigError(f"host {self.host!r} should be a loopback address, as 127.0.0.2")


class Franky:
    """`start` and `stop` one process. It ends with the one that started it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.process: subprocess.Popen[str] | None = None
        self.folder: Path | None = None

    def start(self) -> dict[str, Any]:
        """Settings for the driver: its `host`, and its `senses` where something stands there.
        DriverError where it does not come up."""
        self.stop()
        self.folder = Path(tempfile.mkdtemp(prefix="franky-", dir=memory_folder()))
        settings = asdict(self.config)
        settings["host"] = self.config.host or _address()
        (self.folder / SETTINGS).write_text(json.dumps(settings))
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "envs.franky_main", str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for whoever started it, which ends it in order
            )
        said: dict[str, Any] = json.loads(self._first_line())
        names = said.pop("names")
        if names:
            target = "real_robot.seen.Seen"
            folder = str(self.folder)
            said["senses"] = {"_target_": target, "folder": folder, "names": names, "age": AGE}
        return said

    def stop(self) -> None:
        """End it; safe to call twice."""
        if self.process is not None:
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.stdin.close()
            try:
                self.process.wait(5.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process.stdout.close()
            self.process = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    @property
    def pid(self) -> int:
        """0 where it does not run."""
        return 0 if self.process is None or self.process.poll() is not None else self.process.pid

    def _first_line(self) -> str:
        assert self.process is not None and self.process.stdout is not None
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.process.poll() is None:
            if select.select([self.process.stdout], [], [], 0.1)[0] and (
                line := self.process.stdout.readline()
            ):
                return line
        words = self._last_words()
        self.stop()
        raise DriverError(f"franky-sim did not start: {words or 'it says nothing'}")

    def _last_words(self) -> str:
        assert self.folder is not None
        lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""


def _address() -> str:
    """A loopback address that nobody else is likely to have."""
    return "127." + ".".join(str(1 + secrets.randbelow(254)) for _ in range(3))
