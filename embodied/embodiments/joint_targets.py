"""JointTargets: joint positions themselves as actions, for programs that command them."""

from __future__ import annotations

from dataclasses import dataclass

from embodied.core.bounds import Count, Positive
from embodied.core.build import ConfigError
from embodied.embodiments.arrays import Floats
from embodied.embodiments.controller import Controller, Reference


@dataclass(frozen=True)
class Config:
    """Settings of joint targets."""

    joints: Count  # number of joints
    hand: bool = True  # the last element is the hand's opening
    dt: Positive = 0.05  # control period, s

    def __post_init__(self) -> None:
        if self.joints < 1 or not self.dt > 0:
            raise ConfigError("joint_targets: joints should be 1 or more, dt above 0")


class JointTargets(Controller):
    """Actions are rad (m for sliding joints), not numbers in [-1, 1], and the opening of the hand
    in m. Nothing is limited here: the safety chain does that."""

    def __init__(self, config: Config) -> None:
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
