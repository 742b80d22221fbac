"""Driver: the interface that reads a robot's joints and sends it joint targets; its springs; and a
dry run of one. A driver knows nothing of policies.

Springs hold an arm between two set-points, as the safety chain knows it:

    torque = K (q_d - q) - D dq            joints:  [n] N m/rad, N m s/rad
    force  = K (x_d - x) - D v             tool:    x, y, z (N/m, N s/m), then the turn about them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np

from embodied.core.bounds import Bound, Count, Number
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.driver import (
    ArmDriver,
    DriverError,
    HasSprings,
    Springs,
    StopCategory,
    springs_of,
)

Wait = Annotated[float, Bound(above=0.0, high=3600.0)]  # a time limit, s

MOST_DROOP = 0.05  # rad: an arm that hangs lower than that is pressed down
SOFTEST = 0.1  # lowest stiffness, as a share of the settings
Gain = Annotated[float, Bound(above=0.0, high=3000.0)]


@dataclass(frozen=True)
class Outside:
    """What programs outside call a robot's joints and its hand, and the units they count them in:
    rad (of the hand: m) = (value - zero) unit. One number each per joint, then of the hand."""

    names: tuple[str, ...]  # as LeRobot's shoulder_pan.pos
    zero: tuple[Number, ...]  # values of joints at 0 rad, and of a closed hand
    unit: tuple[Number, ...]  # rad (m) of a value of 1, sign included
    joints: Count  # number of joints: one less than names where there is a hand

    @property
    def hand(self) -> bool:
        """Whether the last name is the hand's."""
        return len(self.names) > self.joints

    def values(self, q: Floats, width: float) -> Floats:
        """Values outside [k] of joints at `q` [n] (rad) and a hand open by `width` (m)."""
        ours = np.append(q, width) if self.hand else np.asarray(q)
        return np.asarray(self.zero) + ours / np.asarray(self.unit)

    def positions(self, values: Floats) -> Floats:
        """The inverse: rad of each joint, then m of the hand [..., k]."""
        return (np.asarray(values) - np.asarray(self.zero)) * np.asarray(self.unit)


def in_degrees(joints: Sequence[str], opening: float = 0.0) -> Outside:
    """Joints in degrees and, with an `opening` (m), a hand from 0 to 100, as LeRobot counts."""
    names = tuple(f"{name.removesuffix('.pos')}.pos" for name in joints)
    hand = 1 if opening else 0
    return Outside(
        (*names, *("gripper.pos",) * hand),
        (0.0,) * (len(names) + hand),
        (*(float(np.pi / 180),) * len(names), *(opening / 100,) * hand),
        len(names),
    )


class Driver(ArmDriver):
    """What the kernel needs of a driver, and what other programs ask of it. Leaving its context
    stops the arm and lets go of the wire."""

    @property
    def width(self) -> float:
        return 0.0

    def outside(self) -> Outside | None:
        """What programs outside call what this robot measures and takes; None where there are no
        such names. ConfigError where a unit is not known before the robot is connected."""
        return None

    def calibration(self) -> str:
        """What says where the joints are and which way they turn, as text that changes with it;
        empty where the robot knows that itself. A calibration that is new is rehearsed."""
        return ""

    def reach(self) -> tuple[Floats, Floats] | None:
        """Joint positions [n], low and high, that calibration found reachable; None where the
        arm was not calibrated."""
        return None

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.close()


class DriverAround(Driver):
    """Around another `driver`, which does what this one does not do itself."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.joints = driver.joints
        self.sensed = driver.sensed
        self.grip = driver.grip

    @property
    def springs(self) -> Springs | None:
        return springs_of(self.driver)

    @property
    def stiffness(self) -> tuple[Floats, Floats] | None:
        return stiffness_of(self.driver)

    def sense(self) -> Floats:
        return self.driver.sense()

    def check(self, limits: Limits) -> None:
        self.driver.check(limits)

    def limit_hand(self, speed: float, force: float) -> None:
        self.driver.limit_hand(speed, force)

    def recover(self) -> None:
        self.driver.recover()

    def cut(self) -> None:
        self.driver.cut()

    def halt(self) -> StopCategory:
        return self.driver.halt()

    def stop(self) -> None:
        self.driver.stop()

    def close(self) -> None:
        self.driver.close()


class RestDroop:
    """A driver's `droop` as it was at the last rest: servos know no gravity, and masses are
    unknown."""

    _droop: Floats

    def unloaded(self, stretch: Floats) -> None:
        """Take `stretch` [n] (rad) as the arm's droop, at most `MOST_DROOP`."""
        np.clip(stretch, -MOST_DROOP, MOST_DROOP, out=self._droop)

    def droop(self, q: Floats) -> Floats:
        """The droop [n] (rad) before the last start, wherever the arm is now."""
        return self._droop


class DryRunDriver(DriverAround):
    """Holds the real arm where it stands. The wire, its stamps and its faults are those of
    `driver`; the joints are where they were sent, as of an arm that follows at once."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self._q: Floats = np.zeros(len(driver.joints))
        self._dq = self._q.copy()
        self._held = self._q.copy()
        self._t = 0.0
        self._sent = 0.0
        self._width = 0.0
        self._held_width = 0.0

    def connect(self) -> None:
        self.driver.connect()
        arm = self.driver.read()
        self._q = arm.q.copy()
        self._t = arm.t
        self._sent = arm.t
        self._stand(arm)
        self._width = self._held_width

    def recover(self) -> None:
        """Hold the arm where it stands now: somebody may have moved it while it was stopped."""
        self.driver.recover()
        self._stand(self.driver.read())

    def _stand(self, arm: ArmState) -> None:
        self._held = arm.q.copy()
        self._held_width = self.driver.width

    def read(self) -> ArmState:
        arm = self.driver.read()
        self._t = arm.t
        return ArmState(self._q.copy(), self._dq.copy(), arm.tau, arm.t, arm.force, arm.external)

    def write(self, q: Floats, width: float) -> None:
        self.driver.write(self._held, self._held_width)
        if self._t > self._sent:
            self._dq = (q - self._q) / (self._t - self._sent)
            self._sent = self._t
        self._q = q.copy()
        self._width = width

    @property
    def width(self) -> float:
        return self._width

    def stiffen(self, stiffness: Floats) -> None:
        """Check `stiffness` [m]; the arm that is held keeps its own."""
        check_stiffness(stiffness, self.stiffness, type(self.driver).__name__)

    def release(self) -> None:
        raise DriverError("a dry run holds the arm: release it without dry=true")


@dataclass(frozen=True)
class Tool:
    """Springs on the tool's pose, critically damped."""

    stiffness: Gain = 500.0  # of the tool's place, N/m
    turning: Gain = 30.0  # of the tool's turn, N m/rad
    force: Gain = 30.0  # largest pull on the place, N
    torque: Gain = 5.0  # largest pull on the turn, N m
    elbow: Gain = 10.0  # of the motion that leaves the tool where it is, N m/rad


def stiffness_of(driver: ArmDriver) -> tuple[Floats, Floats] | None:
    """Lowest and highest stiffness [m] of the driver's springs; None where it has none."""
    return driver.stiffness if isinstance(driver, HasSprings) else None


def check_stiffness(stiffness: Floats, span: tuple[Floats, Floats] | None, name: str) -> None:
    """DriverError where driver `name` cannot hold an arm with `stiffness` [m]."""
    if span is None:
        raise DriverError(f"{name} cannot change its stiffness")
    low, high = span
    if np.shape(stiffness) != low.shape or not ((stiffness >= low) & (stiffness <= high)).all():
        raise DriverError(
            f"{name} was asked for a stiffness of {np.round(stiffness, 2).tolist()}; it takes "
            f"{low.tolist()} to {high.tolist()}"
        )


def tool_springs(tool: Tool) -> Springs:
    """The springs of a tool's settings. Damping is critical for a mass of 1 kg (1 kg m^2)."""
    stiffness = np.repeat([tool.stiffness, tool.turning], 3)
    stretch = np.repeat([tool.force / tool.stiffness, tool.torque / tool.turning], 3)
    return Springs("tool", stiffness, 2 * np.sqrt(stiffness), stretch)


def span(springs: Springs) -> tuple[Floats, Floats]:
    """Lowest and highest stiffness [m] of springs while they hold an arm. The settings are the
    highest, because the bound of the pull was chosen for them."""
    return SOFTEST * springs.stiffness, springs.stiffness


def damped(springs: Springs, stiffness: Floats) -> Floats:
    """The damping [m] that goes with another stiffness [m]: the damping ratio stays."""
    return springs.damping * np.sqrt(stiffness / springs.stiffness)
