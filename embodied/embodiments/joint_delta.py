"""JointDelta: joint velocity action space of an arm, with joint position targets, batched.

The set-point of joint i moves by dt speed_i a_i in a control step, a in [-1, 1]. It stays within
`lead` of the measured position, which bounds the torque of a position-controlled joint.
"""

from __future__ import annotations

from dataclasses import dataclass

from embodied.core.bounds import Number, Positive
from embodied.core.build import ConfigError
from embodied.embodiments import fr3
from embodied.embodiments.arrays import Floats, constant, namespace
from embodied.embodiments.controller import Controller, Reference


@dataclass(frozen=True)
class Config:
    """Settings of joint velocities, one number per joint. The hand keeps its opening."""

    dt: Positive = 0.1  # control period, s
    speed: tuple[Positive, ...] = (0.6, 0.6, 0.2, 0.6, 0.1, 0.2, 0.1)  # of an action of 1, rad/s
    lead: tuple[Positive, ...] = (0.1,) * 7  # how far set-points may be ahead, rad
    low: tuple[Number, ...] = tuple(fr3.LOWER + 0.05)  # smallest set-points, rad
    high: tuple[Number, ...] = tuple(fr3.UPPER - 0.05)  # largest set-points, rad

    def __post_init__(self) -> None:
        sizes = {len(self.speed), len(self.lead), len(self.low), len(self.high)}
        if len(sizes) > 1 or min(self.dt, *self.speed, *self.lead) <= 0:
            raise ConfigError(
                "joint_delta: speed, lead, low and high need one number per joint, dt, speed and "
                "lead above 0"
            )


class JointDelta(Controller):
    """The action space of an arm without a hand: one velocity per joint."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.names = tuple(f"velocity{i + 1}" for i in range(len(config.speed)))

    def __call__(
        self, action: Floats, q: Floats, reference: Reference
    ) -> tuple[Floats, Floats, Reference]:
        """Joint targets [B, n] (rad), hand width [B] (m) and the moved reference, for `action`
        [B, n] in [-1, 1] and measured joint positions `q` [B, n]."""
        config = self.config
        xp = namespace(q)
        target = reference["q"] + config.dt * constant(config.speed, q) * action
        target = within_lead(target, q, constant(config.lead, q))
        target = xp.clip(target, constant(config.low, q), constant(config.high, q))
        return target, reference["width"], {"q": target, "width": reference["width"]}


def within_lead(target: Floats, q: Floats, lead: Floats) -> Floats:
    """Joint targets [B, n], at most `lead` [n] from the measured positions `q` [B, n]."""
    return q + namespace(q).clip(target - q, -lead, lead)
