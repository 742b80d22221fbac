"""Scripted demonstrator for ManiSkill's PickCube: above the cube, down, close, to the goal.

It reads the flat state by element names and moves the gripper by position differences
(`control_mode: pd_ee_delta_pos`; an action of 1 is `reach` metres).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import NonNegative, Positive
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors

SEEN = {"cube": "extra_tcp_to_obj_pos", "goal": "extra_obj_to_goal_pos"}
GRASPED = "extra_is_grasped"


@dataclass(frozen=True)
class Config:
    """Settings of the scripted cube picker."""

    unsteady: NonNegative = 0.1  # standard deviation of the motion noise
    reach: Positive = 0.1  # tool motion of an action of 1, m
    close: Positive = 0.015  # distance of tool and cube at which the gripper closes, m


class PickCube(Policy):
    """Noise [n, 4] is added to the motion; the demonstrator has no memory."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        names = spec.obs["state"].names if "state" in spec.obs else ()
        if spec.act.shape != (4,) or any(f"{name}[0]" not in names for name in SEEN.values()):
            raise ConfigError(
                "this demonstrator needs env.id=PickCube-v1, obs=state and "
                "control_mode=pd_ee_delta_pos"
            )
        self.spec = spec
        self.config = config
        self.chunk = 1
        self.size = 4
        self.at = {key: names.index(f"{name}[0]") for key, name in SEEN.items()}
        self.grasped = names.index(GRASPED)

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, 3)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        state = obs["state"]
        to_cube = state[:, self.at["cube"] :][:, :3]
        to_goal = state[:, self.at["goal"] :][:, :3]
        held = state[:, self.grasped, None] > 0
        # From the side the fingers would push the cube away: first be above it.
        beside = to_cube[:, :2].norm(dim=1, keepdim=True) > 0.01
        down = torch.where(beside, to_cube[:, 2:].clamp(min=0), to_cube[:, 2:])
        way = torch.where(held, to_goal, torch.cat([to_cube[:, :2], down], 1))
        near = to_cube.norm(dim=1, keepdim=True) < self.config.close
        hand = torch.where(held | near, -1.0, 1.0)
        move = way / self.config.reach + self.config.unsteady * noise
        return torch.cat([move, hand], 1).clamp(-1, 1)[:, None], carry
