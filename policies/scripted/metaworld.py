"""Scripted demonstrators for five tasks of MetaWorld v3, on its own observation of 39 numbers.

Source: MetaWorld (Yu et al., 2019), whose package has such scripts; its offsets from the handles of
door and drawer are used here. A script is a list of phases, each of which moves the hand (an action
of 1 is about 1 cm a step) towards a place beside the object or the goal and ends there. An object
that is lost on the way is reached for again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import NonNegative
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors

HAND = slice(0, 3)
OBJECT = slice(4, 7)
GOAL = slice(36, 39)
LOST = 0.12  # m between the hand and an object that it carries


@dataclass(frozen=True)
class Phase:
    """Move the hand to `offset` (m) from the object (`to_goal`: from the goal), the gripper at
    `hand` (-1 open, 1 closed), the speed `gain` times the distance (1/m), until it is within `near`
    (m across, m in height) for `wait` steps. `holds`: an object is in the hand.
    """

    offset: tuple[float, float, float] = (0.0, 0.0, 0.0)
    to_goal: bool = False
    hand: float = -1.0
    gain: float = 10.0
    near: tuple[float, float] = (0.0, 0.0)
    wait: int = 0
    holds: bool = False


GRASP = (
    Phase((-0.005, 0.0, 0.1), near=(0.01, 0.03)),
    Phase((-0.005, 0.0, 0.03), near=(0.02, 0.02)),
    Phase((-0.005, 0.0, 0.03), hand=1.0, near=(0.1, 0.1), wait=12),
)
TASKS = {
    "reach": (Phase(to_goal=True),),
    "push": (*GRASP, Phase(to_goal=True, hand=1.0, holds=True)),
    "pick_place": (*GRASP, Phase(to_goal=True, hand=1.0, holds=True)),
    "door_open": (
        Phase((0.01, 0.02, 0.2), near=(0.02, 0.1), hand=1.0, gain=25.0),
        Phase((0.01, 0.02, 0.0), near=(0.1, 0.03), hand=1.0, gain=25.0),
        Phase((-0.05, 0.0, 0.0), hand=1.0, gain=25.0),
    ),
    "drawer_open": (
        Phase((0.0, 0.0, 0.15), near=(0.02, 0.05)),
        Phase((0.0, 0.0, -0.02), near=(0.1, 0.02)),
        Phase((0.0, -0.06, -0.02), gain=50.0),
    ),
}


@dataclass(frozen=True)
class Config:
    """Settings of the scripted Meta-World policies."""

    task: str  # one of TASKS
    unsteady: NonNegative = 0.1  # standard deviation of the motion noise


class Scripted(Policy):
    """Noise [n, 3] is added to the motion; the carry holds `stage` and `since` [n]."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        state = spec.obs.get("state")
        if config.task not in TASKS or state is None or state.shape != (39,):
            raise ConfigError(
                f"task={config.task}: {', '.join(TASKS)} of env=envpool_metaworld_TASK"
            )
        self.spec = spec
        self.config = config
        phases = TASKS[config.task]
        self.last = len(phases) - 1
        self.offset = torch.tensor([phase.offset for phase in phases])
        self.near = torch.tensor([phase.near for phase in phases])
        numbers = [(p.hand, p.gain, p.wait, p.to_goal, p.holds) for p in phases]
        self.numbers = torch.tensor(numbers, dtype=torch.float32)

    def initial(self, n: int) -> Tensors:
        zeros = torch.zeros(n, dtype=torch.int64)
        return {"stage": zeros, "since": zeros}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, 3)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        state = obs["state"]
        stage = carry["stage"]
        _, _, wait, _, holds = self.numbers[stage].unbind(1)
        off = self._offset_to_phase(state, stage)
        near = torch.stack([off[:, :2].norm(dim=1), off[:, 2].abs()], 1) < self.near[stage]
        passed = near.all(1) & (carry["since"] >= wait) & (stage < self.last)
        lost = (holds > 0) & ((state[:, HAND] - state[:, OBJECT]).norm(dim=1) > LOST)
        after = torch.where(lost, 0, stage + passed.long())
        since = torch.where(after == stage, carry["since"] + 1, 0)
        hand, gain, *_ = self.numbers[after].unbind(1)
        move = self._offset_to_phase(state, after) * gain[:, None] + self.config.unsteady * noise
        action = torch.cat([move, hand[:, None]], 1).clamp(-1, 1)
        return action[:, None], {"stage": after, "since": since}

    def _offset_to_phase(self, state: Tensor, stage: Tensor) -> Tensor:
        """The vector from the hand to where the phase wants it, [n, 3] (m)."""
        to_goal = self.numbers[stage, 3:4] > 0
        anchor = torch.where(to_goal, state[:, GOAL], state[:, OBJECT])
        return anchor + self.offset[stage] - state[:, HAND]
