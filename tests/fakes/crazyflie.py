"""A Crazyflie in the air of this process, which a test can do things to while it flies."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Self

from embodied.envs.hardware_sim.crazyflie import Config
from embodied.envs.hardware_sim.crazyflie_flight import Air
from embodied.real_robot.emulators.crazyflie import Firmware


class FakeCrazyflie:
    """As a context: it serves from a thread until the end. `uri` is where."""

    def __init__(self, folder: Path | None = None, **settings: Any) -> None:
        self.air = Air(Config(**settings), folder)
        self.firmware, self.uri = self.air.firmware, self.air.uri
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.air.serve, args=(self.over,), daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join(10.0)

    @property
    def height(self) -> float:
        """Where it really is, m."""
        return float(self.air.body.state[2])

    @property
    def place(self) -> tuple[float, ...]:
        return tuple(float(each) for each in self.air.body.state[:3, 0])

    @property
    def down(self) -> bool:
        """On the floor, motors off."""
        return self.height < 0.01 and float(self.air.body.state[13:17].max()) < 0.05

    def switch_off_and_on(self) -> None:
        """By hand, wherever it lies."""
        old = self.firmware
        made = Firmware(old.body, old.now, old.voltage)
        self.firmware = self.air.firmware = self.air.server.firmware = made

    def drain(self, volts: float) -> None:
        """From now on its battery has so much."""
        self.firmware.voltage = volts
