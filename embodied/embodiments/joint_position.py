"""Joint spaces: JointPosition, JointDelta and JointTargets, with joint targets as results, batched.

JointPosition has absolute joint targets as actions, of any arm:

    target_i = low_i + (a_i + 1) / 2 (high_i - low_i)                an action in [-1, 1]
    target_i = unit_i (a_i - zero_i)                                 `action` "rad" or "deg"

within the joint limits, the speed limit and `lead` of the measured position. JointDelta has joint
velocities as actions: a set-point moves by dt speed_i a_i in a control step and stays within `lead`
of the measured position, which bounds the torque of a position-controlled joint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from embodied.core.bounds import Count, NonNegative, Number, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.embodiments import fr3
from embodied.embodiments.arrays import Floats, constant, namespace
from embodied.embodiments.controller import Controller, Reference
from embodied.embodiments.kinematics.arm import load_arm

DEGREE = np.pi / 180


@dataclass(frozen=True)
class Config:
    """Settings of joint position actions.

    Actions "normalized" in [-1, 1] mean `low` and `high`; "rad" and "deg" are joint positions
    themselves, as a policy in physical units says them (m for sliding joints). Where a dataset
    counts a joint the other way round, its `low` is above its `high`. With physical actions, the
    values `hand_values` stand for the two openings `width`, for example (0, 100); `zero` and `unit`
    are for joints that are counted from elsewhere, or the other way round.
    """

    arm: str = "fr3"  # fr3, so101, ur5e, or an arm file (`embodied robot describe`)
    dt: Positive = 0.05  # control period, s
    action: Literal["normalized", "rad", "deg"] = "normalized"  # what the numbers of an action are
    low: tuple[Number, ...] = ()  # positions of -1, rad or `degrees` (empty: the limits)
    high: tuple[Number, ...] = ()  # positions of 1, rad or `degrees` (empty: the limits)
    degrees: bool = False  # `low` and `high` are in degrees
    width: tuple[NonNegative, NonNegative] | None = None  # hand openings at -1 and 1, m
    hand_values: tuple[Number, Number] = (-1.0, 1.0)  # physical actions of closed and open hands
    zero: tuple[Number, ...] = ()  # physical actions of joints at 0 rad (empty: 0)
    unit: tuple[Number, ...] = ()  # rad of a physical action of 1 (empty: 1, or that of a degree)
    keys: tuple[str, ...] = ()  # names of the action's elements (empty: made from the arm's)
    speed: PositiveFraction = 0.8  # share of the joints' velocity limits
    lead: Positive = 0.5  # how far the target may be from the measured position, rad or m

    def __post_init__(self) -> None:
        if self.action != "normalized" and (self.low or self.high or self.degrees):
            raise ConfigError(
                f"joint_position: action={self.action} takes joint positions as they are; low, "
                "high and degrees go with action=normalized"
            )
        if self.action == "normalized" and (
            self.hand_values != (-1.0, 1.0) or self.zero or self.unit
        ):
            raise ConfigError(
                "joint_position: hand_values, zero and unit go with action=rad or action=deg"
            )
        if 0 in self.unit:
            raise ConfigError("joint_position: unit should not be 0")
        if self.hand_values[0] == self.hand_values[1]:
            raise ConfigError("joint_position: hand_values should be two different numbers")


class JointPosition(Controller):
    """One joint position per joint, then the opening of the hand where the arm has one."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.arm = load_arm(config.arm)
        self.physical = config.action != "normalized"
        hand = ("gripper.pos",) if self.arm.hand is not None else ()
        self.names = (*(f"{name}.pos" for name in self.arm.joints), *hand)
        if config.keys and len(config.keys) != len(self.names):
            raise ConfigError(f"joint_position: keys needs {len(self.names)} names")
        self.names = config.keys or self.names
        unit = DEGREE if config.degrees else 1.0
        low = self._row("low", config.low, self.arm.lower / unit) * unit
        high = self._row("high", config.high, self.arm.upper / unit) * unit
        self.middle = (low + high) / 2
        self.half = (high - low) / 2
        if self.physical:
            whole = np.full(len(self.arm), DEGREE if config.action == "deg" else 1.0)
            self.half = self._row("unit", config.unit, whole)
            self.middle = -self._row("zero", config.zero, np.zeros(len(self.arm))) * self.half

    def begin(self, q: Floats, width: Floats) -> Reference:
        """The reference of arms that stand at `q` [B, n] with hands `width` [B] m open."""
        return {"place": self.arm.forward(q)[0], **super().begin(q, width)}

    def __call__(
        self, action: Floats, q: Floats, reference: Reference
    ) -> tuple[Floats, Floats, Reference]:
        """Joint targets [B, n] (rad, m), hand width [B] (m) and the moved reference (`place`: the
        tool at the target), for `action` [B, A] and measured joint positions `q` [B, n]."""
        config = self.config
        arm = self.arm
        xp = namespace(q)
        n = len(self.arm)
        target = self.positions(action[:, :n])
        most = constant(config.speed * arm.velocity * config.dt, q)
        before = reference["q"]
        target = xp.clip(target, before - most, before + most)
        target = within_lead(target, q, constant(np.full(n, config.lead), q))
        target = xp.clip(target, constant(arm.lower, q), constant(arm.upper, q))
        width = self._width(action, reference["width"])
        return target, width, {"place": arm.forward(target)[0], "q": target, "width": width}

    def positions(self, action: Floats) -> Floats:
        """Joint positions [B, n] (rad) that the actions [B, n] of the joints mean."""
        return constant(self.middle, action) + constant(self.half, action) * action

    def opening(self, action: Floats) -> Floats:
        """Openings [B] (m) that the hand's actions [B] mean. ConfigError without a hand."""
        hand = self.arm.hand
        if hand is None:
            raise ConfigError(f"{self.arm.name} has no hand")
        (low, high) = self.config.width or (0.0, hand.open)
        first, last = self.config.hand_values
        return low + (action - first) / (last - first) * (high - low)

    def _width(self, action: Floats, before: Floats) -> Floats:
        """The hand's next opening [B] (m)."""
        hand = self.arm.hand
        if hand is None:
            return before
        xp = namespace(before)
        aim = xp.clip(self.opening(action[:, -1]), 0.0, hand.open)
        change = hand.speed * self.config.dt
        return before + xp.clip(aim - before, -change, change)

    def _row(self, name: str, given: Sequence[float], otherwise: Floats) -> Floats:
        if given and len(given) != len(self.arm):
            raise ConfigError(
                f"joint_position: {name} has {len(given)} numbers, {self.arm.name} has "
                f"{len(self.arm)} joints"
            )
        row = np.asarray(given, float) if given else otherwise
        if not np.isfinite(row).all():
            raise ConfigError(f"joint_position: {name} should be finite numbers")
        return row


@dataclass(frozen=True)
class JointDeltaConfig:
    """Settings of joint velocities, one number per joint. The hand keeps its opening."""

    dt: Positive = 0.1  # control period, s
    speed: tuple[Positive, ...] = (0.6, 0.6, 0.2, 0.6, 0.1, 0.2, 0.1)  # of an action of 1, rad/s
    lead: tuple[Positive, ...] = (0.1,) * 7  # how far set-points may be ahead, rad
    low: tuple[Number, ...] = tuple(fr3.LOWER + 0.05)  # smallest set-points, rad
    high: tuple[Number, ...] = tuple(fr3.UPPER - 0.05)  # largest set-points, rad

    def __post_init__(self) -> None:
        sizes = {len(self.speed), len(self.lead), len(self.low), len(self.high)}
        if len(sizes) > 1:
            raise ConfigError("joint_delta: speed, lead, low and high need one number per joint")


class JointDelta(Controller):
    """The action space of an arm without a hand: one velocity per joint."""

    def __init__(self, config: JointDeltaConfig) -> None:
        self.config = config
        self.names = tuple(f"velocity{i + 1}" for i in range(len(config.speed)))

    def __call__(
        self, action: Floats, q: Floats, reference: Reference
    ) -> tuple[Floats, Floats, Reference]:
        """Joint targets [B, n] (rad), hand width [B] (m) and the moved reference, for `action`
        [B, n] in [-1, 1] and measured joint positions `q` [B, n]."""
        config = self.config
        target = reference["q"] + config.dt * constant(config.speed, q) * action
        target = within_lead(target, q, constant(config.lead, q))
        target = namespace(q).clip(target, constant(config.low, q), constant(config.high, q))
        return target, reference["width"], {"q": target, "width": reference["width"]}


def within_lead(target: Floats, q: Floats, lead: Floats) -> Floats:
    """Joint targets [B, n], at most `lead` [n] from the measured positions `q` [B, n]."""
    return q + namespace(q).clip(target - q, -lead, lead)


@dataclass(frozen=True)
class JointTargetsConfig:
    """Settings of joint targets."""

    joints: Count  # number of joints
    hand: bool = True  # the last element is the hand's opening
    dt: Positive = 0.05  # control period, s


class JointTargets(Controller):
    """Joint positions themselves, for programs that command them. Actions are rad (m for sliding
    joints), not numbers in [-1, 1], and the opening of the hand in m. Nothing is limited here: the
    safety chain does that."""

    physical = True

    def __init__(self, config: JointTargetsConfig) -> None:
        self.config = config
        hand = ("width",) if config.hand else ()
        self.names = (*(f"q{i}" for i in range(1, config.joints + 1)), *hand)

    def __call__(
        self, action: Floats, q: Floats, reference: Reference
    ) -> tuple[Floats, Floats, Reference]:
        """Joint targets [B, n] (rad, m), hand widths [B] (m) and the next reference."""
        joints = action[:, : self.config.joints]
        width = action[:, -1] if self.config.hand else reference["width"]
        return joints, width, {"q": joints, "width": width}
