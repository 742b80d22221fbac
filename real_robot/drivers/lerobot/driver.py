"""Driver around any LeRobot `Robot`, behind this project's control process and safety chain.

LeRobot runs in a process of its own (`bridge.py` beside this file), with the interpreter that has
it: its versions of PyTorch and Python are not ours, and a read of its bus blocks. Each tick takes
the newest measurement and sends one command; neither waits.

What a LeRobot robot does not have, this driver has not either: torques are zeros, so that
`limits.torque` never acts; velocities are differences of positions. LeRobot's `connect` may switch
torque off for a moment while it writes to the motors: support the arm then. Torque comes on where
the motors stand (those on one of LeRobot's motor buses; other robots decide that themselves). It
cannot be released to be guided by hand.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from embodied.core.build import ConfigError
from embodied.real_robot.control.arm_state import ArmState, Floats, Limits
from embodied.real_robot.drivers.driver import Driver, DriverError, RestDroop
from embodied.real_robot.drivers.lerobot.process import (
    Hand,
    Joint,
    LeRobotProcess,
    Source,
    Units,
    motor,
)

SLACK = 0.035  # rad (2 degrees) outside of what calibration found that are not yet a mistake
__all__ = ["Config", "LeRobotDriver"]


@dataclass(frozen=True, kw_only=True)
class Config(Source):
    """Settings of a robot of LeRobot."""

    joints: tuple[Joint, ...]  # in the order of the limits
    hand: Hand | None = None  # the gripper; null: none

    def __post_init__(self) -> None:
        keys = [joint.key for joint in self.joints]
        keys += [] if self.hand is None else [self.hand.key]
        if not self.joints or len(set(keys)) < len(keys):
            raise ConfigError("driver: every joint, and the hand, needs a key of its own")

    @property
    def keys(self) -> tuple[str, ...]:
        """LeRobot's names of the joints, and last of the hand."""
        hand = () if self.hand is None else (self.hand.key,)
        return (*(joint.key for joint in self.joints), *hand)


class LeRobotDriver(RestDroop, Driver):
    """Positions are rad at the joints. A measurement older than `silence` s is a fault."""

    falls_when_released = True

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.joints = tuple(joint.name or motor(joint.key) for joint in config.joints)
        self.process = LeRobotProcess(config, "robot", config.keys)
        self._droop = np.zeros(len(config.joints))
        self._units: Units | None = None
        self._last: ArmState | None = None

    def connect(self) -> None:
        try:
            self.process.start()
            self._units = Units(self.config.joints, self.process.ready)
        except (DriverError, ConfigError) as error:
            self.close()
            raise DriverError(str(error)) from error
        self._last = None

    def read(self) -> ArmState:
        self.process.drain()
        # Both clocks are the machine's monotonic one; `clock` is another in tests.
        age = time.monotonic() - self.process.seen
        state = self._state(self.clock() - age)
        if age > self.config.silence:
            raise DriverError(
                f"LeRobot's {self.config.type} gave no measurement for {age:.2f} s: look at "
                "its cable and power, then reset",
                state,
            )
        return state

    def _state(self, t: float) -> ArmState:
        assert self._units is not None
        q = self._units.rad(np.array(self.process.values[: len(self.joints)]))
        last = self._last
        if last is not None and t - last.t < 1e-4:
            return last  # the same measurement
        dq = np.zeros(len(q)) if last is None else (q - last.q) / (t - last.t)
        self._last = ArmState(q, dq, np.zeros(len(q)), t)
        return self._last

    def write(self, q: Floats, width: float) -> None:
        if self._units is None or not (np.isfinite(q).all() and math.isfinite(width)):
            raise DriverError(f"the arm was sent to {np.round(q, 3).tolist()}, {width}: no numbers")
        values = self._units.values(q).tolist()
        if self.config.hand is not None:
            values.append(self.config.hand.value(width))
        self.process.send(values)

    @property
    def width(self) -> float:
        hand = self.config.hand
        if hand is None or not self.process.values:
            return 0.0
        return hand.opening(self.process.values[-1])

    def reach(self) -> tuple[Floats, Floats] | None:
        return None if self._units is None else self._units.reach()

    def check(self, limits: Limits) -> None:
        if (reach := self.reach()) is None:
            return
        low = np.add(limits.low, limits.margin) + SLACK
        high = np.subtract(limits.high, limits.margin) - SLACK
        for joint, *ends in zip(self.joints, low, high, *reach, strict=True):
            if ends[0] < ends[2] or ends[1] > ends[3]:
                wanted, found = (f"{a:.2f} to {b:.2f} rad" for a, b in (ends[:2], ends[2:]))
                raise DriverError(
                    f"{joint}: the limits ask for {wanted}, its calibration reached {found}: "
                    "make limits.low and limits.high narrower, or calibrate it again"
                )

    def recover(self) -> None:
        """Start LeRobot again only where its process is gone: `connect` may switch torque off for a
        moment."""
        if self.process.running:
            with suppress(DriverError):
                self.read()
                return
        self.close()
        self.connect()

    def stop(self) -> None:
        if self._last is None or self._units is None:
            return
        with suppress(DriverError):  # a process that is gone: its servos hold their last goal
            self.read()
            self.write(self._last.q + self._droop, self.width)

    def close(self) -> None:
        self.process.close()
