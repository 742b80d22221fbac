"""ServoArm: an arm of servos that is not there: a servo bus on a pseudo-terminal, in a process."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

from embodied.core.build import ConfigError
from real_robot.counterparts.servo_bus import Faults
from real_robot.drivers.driver import DriverError

PATIENCE = 60.0  # s until it is there, on a machine that does much else


@dataclass(frozen=True)
class Config:
    """`ticks` [n]: where servos 1 to n stand at first; `faults` of the wire."""

    protocol: Literal["dynamixel", "feetech"]
    ticks: tuple[float, ...]
    faults: Faults | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.ticks or not all(0 <= tick <= 4095 for tick in self.ticks):
            raise ConfigError("ticks: where each servo stands, from 0 to 4095")


class ServoArm:
    """`start` and `stop` one process. It ends with the one that started it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> dict[str, Any]:
        """Settings for the driver: its `port`. DriverError where it does not come up."""
        self.stop()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "real_robot.counterparts.servo_arm_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for whoever started it, which ends it in order
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(asdict(self.config)) + "\n")
        self.process.stdin.flush()
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.process.stdout], [], [], 0.1)[0]:
                return json.loads(self.process.stdout.readline())
        self.stop()
        raise DriverError("the counterpart of the servo arm did not start")

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
