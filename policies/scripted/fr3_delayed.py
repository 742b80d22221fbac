"""DelayedLift: the FR3 lift script for a robot with actuation delay and a slow gripper.

A step covers the fraction `calm` of the remaining distance (an arm with a delay of d steps
oscillates if calm d > pi / 2), and is limited to that fraction of full speed. When to raise depends
on measurements only, so that a BC policy can learn it from its observations:

    holds  <=>  width < 2 half (|cos yaw| + |sin yaw|) + slack,     the width of a rotated cube
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embodied.core.bounds import NonNegative, PositiveFraction
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.policies.scripted import fr3
from embodied.policies.scripted.fr3 import Plan, Scripted, Seen

UP = 4  # the phase of `scripted.lift` in which it raises


@dataclass(frozen=True)
class Config(fr3.Config):
    """Settings as in `embodied.policies.scripted.fr3`, and those of the delay."""

    task: str = "lift"  # which task of the environment
    calm: PositiveFraction = 0.5  # share of the remaining distance that a step covers
    slack: NonNegative = 0.006  # of the width that counts as closed on the cube, m


class DelayedLift(Scripted):
    """From above, down, close until it holds, up; over again when the cube is not in the hand."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.calm = config.calm
        self.slack = config.slack
        self.plan = self._plan

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        actions, carry = super().act(obs, carry, noise)
        calmed = torch.cat([self.calm * actions[..., :-1], actions[..., -1:]], -1)
        return calmed, carry

    def _plan(self, seen: Seen) -> Plan:
        plan = fr3.lift(seen)
        state = seen.state
        yaw = torch.atan2(state["cube_sin_4yaw"], state["cube_cos_4yaw"]) / 4
        wide = 2 * state["cube_half"] * (yaw.cos() + yaw.sin().abs())
        holds = (state["width"] < wide + self.slack)[:, None]
        place = plan.place.clone()
        place[:, UP] = torch.where(holds, place[:, UP], place[:, UP - 1])
        return replace(plan, place=place)
