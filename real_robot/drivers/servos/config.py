"""Settings of an arm of servos on one serial bus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embodied.core.build import ConfigError
from embodied.real_robot.drivers.servos.packet import HIGHEST_ID


@dataclass(frozen=True)
class Joint:
    """`zero`: tick where the joint is at 0 rad; `sign`: -1 where it turns the other way than the
    servo; `ratio`: turns of the servo for one of the joint; `low`, `high`: ticks that calibration
    found to be reachable; `torque`: N m at the servo's shaft per A (0: not known, not measured)."""

    name: str
    id: int
    low: int
    high: int
    zero: int = 2048
    sign: Literal[-1, 1] = 1
    ratio: float = 1.0
    torque: float = 0.0


@dataclass(frozen=True)
class Hand:
    """A gripper's servo: ticks where it is `closed` and `open`, and `width` (m) when it is open.
    `force`: the share of the servo's torque that it closes with at most."""

    id: int
    closed: int
    open: int
    width: float
    force: float = 0.5


@dataclass(frozen=True)
class Config:
    """`timeout` (s) of one exchange, asked again up to `retries` times; `watchdog` (s) of silence
    after which a Dynamixel stops by itself (Feetech's servos have none, and hold their goal);
    `ampere`: A of one unit of measured current (None: 2.69 mA of an X servo, 6.5 mA of an STS3215;
    an XL330 has 1 mA)."""

    protocol: Literal["dynamixel", "feetech"]
    port: str
    joints: tuple[Joint, ...]
    hand: Hand | None = None
    baud: int = 1_000_000
    timeout: float = 0.01
    retries: int = 3
    watchdog: float = 0.2
    ampere: float | None = None

    def __post_init__(self) -> None:
        ids = [joint.id for joint in self.joints] + [hand.id for hand in some(self.hand)]
        if (
            not self.joints
            or len(set(ids)) < len(ids)
            or not all(0 <= i <= HIGHEST_ID for i in ids)
        ):
            raise ConfigError(f"servo ids {ids} should be different, from 0 to {HIGHEST_ID}")
        for joint in self.joints:
            if not (joint.low < joint.high and joint.ratio > 0 and joint.torque >= 0):
                raise ConfigError(f"joint {joint.name}: needs low < high, ratio > 0, torque >= 0")
        if any(hand.closed == hand.open or hand.width <= 0 for hand in some(self.hand)):
            raise ConfigError("hand: closed and open should differ, and width be above 0")
        if not all(0.05 <= hand.force <= 1 for hand in some(self.hand)):
            raise ConfigError("hand: force is a share of its torque, from 0.05 to 1")
        if not (self.timeout > 0 and self.retries >= 0 and 0.02 <= self.watchdog <= 2.54):
            raise ConfigError("timeout should be above 0, watchdog from 0.02 to 2.54 s")


def some(hand: Hand | None) -> tuple[Hand, ...]:
    """Its hand, or none."""
    return () if hand is None else (hand,)
