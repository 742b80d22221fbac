"""Settings of an arm of servos on one serial bus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from embodied.core.bounds import Bound, Count, Positive, Whole
from embodied.core.build import ConfigError
from embodied.real_robot.drivers.servos.packet import HIGHEST_ID

Ampere = Annotated[float, Bound(above=0.0, high=10.0)]


@dataclass(frozen=True)
class Joint:
    """A servo of the arm. A tick is 1/4096 of a turn."""

    name: str  # of the joint
    id: Annotated[int, Bound(0, HIGHEST_ID)]  # of the servo
    low: Whole  # lowest tick that calibration found to be reachable
    high: Whole  # highest tick that calibration found to be reachable
    zero: Whole = 2048  # tick where the joint is at 0 rad
    sign: Literal[-1, 1] = 1  # -1: the joint turns the other way than the servo
    ratio: Positive = 1.0  # turns of the servo for one of the joint
    torque: Annotated[float, Bound(0.0, 1e3)] = 0.0  # N m per A at the servo; 0: not measured


@dataclass(frozen=True)
class Hand:
    """The gripper's servo."""

    id: Annotated[int, Bound(0, HIGHEST_ID)]  # of the servo
    closed: Whole  # tick where it is closed
    open: Whole  # tick where it is open
    width: Annotated[float, Bound(above=0.0, high=1.0)]  # opening there, m
    force: Annotated[float, Bound(0.05, 1.0)] = 0.5  # largest share of the servo's torque


@dataclass(frozen=True)
class Config:
    """Settings of an arm of servos on one serial bus. A Dynamixel stops by itself after `watchdog`;
    Feetech's servos have no watchdog, and hold their goal."""

    protocol: Literal["dynamixel", "feetech"]  # what the servos speak
    port: str  # /dev/serial/by-id/...
    joints: tuple[Joint, ...]  # servos of the arm, in the order of the limits
    hand: Hand | None = None  # servo of the gripper; null: none
    baud: Count = 1_000_000  # bits a second
    timeout: Annotated[float, Bound(above=0.0, high=10.0)] = 0.01  # s of one exchange
    retries: Annotated[int, Bound(0, 100)] = 3  # times that an exchange is asked again
    watchdog: Annotated[float, Bound(0.02, 2.54)] = 0.2  # s of silence, then a Dynamixel stops
    ampere: Ampere | None = None  # A per unit; null: 2.69e-3 (X), 6.5e-3 (STS3215); XL330: 1e-3

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
    """A tuple of the hand, empty without one."""
    return () if hand is None else (hand,)
