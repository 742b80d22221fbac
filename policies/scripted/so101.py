"""Scripted demonstrator that picks up a cube with an SO-101-style arm, by joint positions.

It moves the tool as the FR3's scripts do (`embodied.policies.scripted.fr3`), with the same
variation; the joints follow by the arm's closed-form inverse kinematics. The roll aligns the jaws
with the cube, whose side the fixed jaw approaches:

    heading of the jaws' motion = pan + pi / 2 - atan2(sin(roll) sin(pitch), cos(roll))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Positive
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.embodiments import so101
from embodied.policies.scripted import fr3
from embodied.policies.scripted.fr3 import CLOSED, Phase, Scripted, Seen

HALF_OPEN = 0.5  # of the hand while it approaches
ABOVE, DOWN, CLOSE, UP = range(4)  # phases
GRASP = 0.018  # m: height of the jaws' tips when they close
GAP = 0.006  # m between the cube and the fixed jaw before they close
TURN = 0.12  # rad that the roll is ahead of the measured one, at most
NAMES = (*(f"{name}.pos" for name in so101.JOINTS), "gripper.pos")


@dataclass(frozen=True)
class Config(fr3.Config):
    """Settings as in `embodied.policies.scripted.fr3`."""

    task: str = "pick"  # pick, no other
    step: Positive = 0.012  # tool motion of a control step at most, m


class ScriptedPick(Scripted):
    """Above the cube, down beside it, close, up; over again while the cube is not in the hand."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        if spec.act.names != NAMES or not spec.act.is_unit:
            raise ConfigError(
                "the script for an SO-101 says joint positions: controller=joint_position"
            )
        low, high = (torch.tensor(ends, dtype=torch.float32) for ends in (so101.LOWER, so101.UPPER))
        self.middle = (low + high) / 2
        self.reach = (high - low) / 2

    def plans(self) -> Mapping[str, Callable[[Seen], Sequence[Phase]]]:
        return {"pick": pick}

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        moves, carry = super().act(obs, carry, noise)
        seen = Seen(self.state(obs), carry["traits"], carry["miss"], carry["clock"], 0)
        roll_now = seen.state["q5"]
        place = seen.point("tool") + seen.point("lead") + self.config.step * moves[:, 0, :3]
        # Steep at the table; the arm is too short to point down higher up.
        steep = seen.trait(4, 1.25, 1.4)
        pitch = steep - 5 * (place[:, 2] - 0.03).clamp(min=0, max=0.12)
        joints = so101.inverse(place, pitch)
        across = joints[:, 0] + math.pi / 2 - heading(seen)
        roll = torch.atan2(across.sin() / pitch.sin(), across.cos())
        roll = torch.where(carry["phase"] < CLOSE, roll, roll_now)
        roll = roll_now + (roll - roll_now).clamp(-TURN, TURN)
        joints = torch.cat([joints, roll[:, None]], 1)
        arm = (joints - self.middle) / self.reach
        return torch.cat([arm, moves[:, 0, -1:]], 1).clamp(-1, 1)[:, None], carry


def heading(seen: Seen) -> Tensor:
    """The heading [n] (rad) of the jaws: the side of the cube that needs the least roll."""
    cube = seen.point("cube")
    yaw = torch.atan2(seen.state["cube_sin_4yaw"], seen.state["cube_cos_4yaw"]) / 4
    pan = torch.atan2(cube[:, 1], cube[:, 0])
    quarter = math.pi / 2
    return yaw + quarter * ((pan + quarter - yaw) / quarter).round()


def pick(seen: Seen) -> list[Phase]:
    """Of tool points: the fixed jaw is at the tool, so the cube is beside it."""
    cube = seen.point("cube")
    tool = seen.point("tool")
    angle = heading(seen)
    across = torch.stack([angle.cos(), angle.sin(), torch.zeros_like(angle)], 1)
    beside = cube - (seen.state["cube_half"] + GAP)[:, None] * across
    beside = beside + 0.5 * seen.miss
    low = torch.cat([beside[:, :2], torch.full_like(cube[:, :1], GRASP)], 1)
    above = low.clone()
    above[:, 2] += seen.trait(2, 0.03, 0.05)
    raised = tool.clone()
    raised[:, 2] = raised[:, 2].clamp(min=GRASP) + 0.25
    dropped = (tool - cube).norm(dim=1) > 0.045
    return [
        Phase(above, HALF_OPEN, 0.012, 0, 50),
        Phase(low, HALF_OPEN, 0.005, 0, 25),
        Phase(tool, CLOSED, 1.0, 8, 8),
        Phase(raised, CLOSED, 0.0, 0, 999, dropped),
    ]
