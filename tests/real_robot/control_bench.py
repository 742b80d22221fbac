"""A control process of a test, whose turns the test makes, and its operator."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from embodied.embodiments.controller import Controller
from embodied.real_robot.control.chunk_follower import ChunkFollower, control_loop
from embodied.real_robot.control.homing import Homing
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.ipc.channels import Channels, Role
from embodied.real_robot.kernel.arm_state import Limits
from embodied.real_robot.kernel.chain import Chain
from embodied.real_robot.kernel.checks import Enabled, Finite, Fresh, FreshConfig, Torque, Tracking
from embodied.real_robot.kernel.limiter import Limiter
from embodied.real_robot.kernel.messages import Command, Mode
from tests.builders import wait_until


class ControlBench:
    """A control process with `driver` as its arm, connected. A turn takes at least `pace` s."""

    def __init__(
        self,
        folder: Path,
        driver: Driver,
        controller: Controller,
        limits: Limits,
        *,
        period: float,  # s, of the limiter
        fresh: FreshConfig,
        pace: float,
        clock: Callable[[], float] = time.monotonic,
        home: Any = None,
    ) -> None:
        stages = [Finite(), Fresh(fresh), Enabled(), Torque(limits), Tracking(limits)]
        chain = Chain(stages, Limiter(limits, period))
        joints, count = len(limits.low), len(chain.names)
        here = Channels.make(folder, joints, count)
        self.there = Channels.open(folder, joints, count, role=Role.ALL)
        self.follower = ChunkFollower(controller, 0.05)
        homing = None if home is None else Homing(home, limits)
        self.control = control_loop(driver, chain, self.follower, here, clock, homing=homing)
        self.pace = pace
        self.control.connect()

    @property
    def mode(self) -> Mode:
        return self.control.mode

    @property
    def fault(self) -> str:
        return self.control.fault

    def turn(self, turns: int = 1) -> Mode:
        for _ in range(turns):
            due = time.monotonic() + self.pace
            self.control.turn()
            time.sleep(max(0.0, due - time.monotonic()))
        return self.mode

    def ask(self, wish: Command, turns: int = 1) -> Mode:
        """The mode so many turns after an operator has asked for `wish`."""
        fields = self.there.request.fields
        fields["number"] += 1
        fields["command"] = wish
        fields["stop"] = self.there.estop.number
        self.there.request.send()
        return self.turn(turns)

    def until(self, so: Callable[[], Any], what: str) -> None:
        """Turn until `so`."""
        wait_until(lambda: (self.turn(), so())[1], what, tick=0.0)

    def becomes(self, mode: Mode) -> None:
        self.until(lambda: self.mode == mode, f"it is {mode.name}")
