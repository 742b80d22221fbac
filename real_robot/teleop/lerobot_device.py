"""LeRobotDevice: any of LeRobot's teleoperators as a device of ours.

It runs in a process of its own, like LeRobot's robots (`real_robot/drivers/lerobot/`), with the
interpreter that has LeRobot. Two kinds: a leader arm, whose joints become a place of the tool, and
a device whose actions are motions of the tool already (gamepad, phone).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from embodied.core.bounds import Number
from embodied.core.build import ConfigError, nearest
from embodied.real_robot.drivers.lerobot.driver import Hand, Joint, LeRobotProcess, Source, Units
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.teleop.devices import LeaderMotion, Reach
from embodied.real_robot.teleop.teleop import MOTION, NO_INPUT, Device, Held


@dataclass(frozen=True, kw_only=True)
class Config(Source):
    """Settings of one of LeRobot's teleoperators: a leader arm (`joints`, `hand`, `reach`) or a
    device of `motions`, which is held while one of the motions is not 0, or the hand moves."""

    joints: tuple[Joint, ...] = ()  # of a leader arm, as of a driver
    hand: Hand | None = None  # of a leader arm; null: none
    reach: Reach | None = None  # how a leader arm leads the follower's tool
    motions: Mapping[str, str] = field(default_factory=dict[str, str])  # its action of dx, dy, ...
    grip: str = ""  # its action of the hand; empty: none
    grip_values: tuple[Number, Number] = (0.0, 2.0)  # values that close and open; others: stay

    def __post_init__(self) -> None:
        if bool(self.joints) == bool(self.motions) or (self.joints and self.reach is None):
            raise ConfigError("give either joints and reach (a leader arm) or motions")
        for name in self.motions:
            if name not in MOTION:
                raise ConfigError(f"motions: there is no {name}{nearest(name, MOTION)}")

    @property
    def keys(self) -> tuple[str, ...]:
        if self.joints:
            hand = () if self.hand is None else (self.hand.key,)
            return (*(joint.key for joint in self.joints), *hand)
        return (*self.motions.values(), *((self.grip,) if self.grip else ()))


class LeRobotDevice(Device):
    """ConfigError where LeRobot's teleoperator cannot be opened; afterwards one that falls silent
    counts as not held."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.process = LeRobotProcess(config, "teleoperator", config.keys)
        try:
            self.process.start()
        except DriverError as error:
            self.process.close()
            raise ConfigError(str(error)) from error
        self.units = Units(config.joints, self.process.ready) if config.joints else None
        self.motion = LeaderMotion(config.reach, clock) if config.reach is not None else None

    def read(self, tool: tuple[float, float, float] | None) -> Held:
        with suppress(DriverError):
            self.process.drain()
            values = self.process.values
            fresh = time.monotonic() - self.process.seen <= self.config.silence
            if fresh and all(math.isfinite(value) for value in values):
                return self._leader(values, tool) if self.motion else self._motions(values)
        return NO_INPUT

    def close(self) -> None:
        self.process.close()

    def _leader(self, values: tuple[float, ...], tool: tuple[float, float, float] | None) -> Held:
        assert self.motion is not None and self.units is not None
        hand, n = self.config.hand, len(self.config.joints)
        grip = 0.0
        if hand is not None:
            grip = 1.0 if hand.opening(values[n]) > hand.width / 2 else -1.0
        return self.motion(self.units.rad(np.array(values[:n])), grip, tool)

    def _motions(self, values: tuple[float, ...]) -> Held:
        given = dict(zip(self.config.motions, values, strict=False))
        x, y, z, roll, pitch, yaw = (given.get(name, 0.0) for name in MOTION)
        grip = 0.0
        if self.config.grip:
            close, opened = self.config.grip_values
            grip = (values[-1] == opened) * 1.0 - (values[-1] == close) * 1.0
        held = any((x, y, z, roll, pitch, yaw)) or bool(grip)
        return Held((x, y, z, roll, pitch, yaw), grip, held)
