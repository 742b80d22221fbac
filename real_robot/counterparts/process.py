"""Process: a counterpart in a process of its own, which ends with the one that started it."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

from real_robot.drivers.driver import DriverError

PATIENCE = 60.0  # s until it is there, on a machine that does much else


class Process:
    """`module` reads `config` (a dataclass) as a line of JSON from its standard input, answers with
    a line of settings for the driver, and ends when its input does. `name` is for people."""

    def __init__(self, module: str, config: Any, name: str) -> None:
        self.module, self.settings, self.name = module, asdict(config), name
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> dict[str, Any]:
        """Settings for the driver. DriverError where it does not come up."""
        self.stop()
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for whoever started it, which ends it in order
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(self.settings) + "\n")
        self.process.stdin.flush()
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.process.stdout], [], [], 0.1)[0] and (
                line := self.process.stdout.readline()  # empty: it has ended
            ):
                return json.loads(line)
        self.stop()
        raise DriverError(f"the counterpart of the {self.name} did not start")

    def stop(self) -> None:
        """End it; safe to call twice."""
        if self.process is None:
            return
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.process = None
