"""Scripted demonstrators for robosuite's Lift, Can and Square: reach, grasp, lift, move, place.

They read robomimic's low-dimensional observations and move the tool by position and yaw differences
(OSC_POSE: an action of 1 is 5 cm, or 0.5 rad). Each env has a stage, which waits for a distance or
for the gripper. An object that is lost on the way is reached for again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import NonNegative
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors

ABOVE, DOWN, CLOSE, UP, OVER, LOWER, OPEN = range(7)
STEP = 0.05  # m of an action of 1
TURN = 0.5  # rad of an action of 1
WAIT = 8  # steps that the gripper takes
LOST = 0.1  # m between the tool and where it has grasped


@dataclass(frozen=True)
class Task:
    """Where an object is in `object`, where it is grasped (in its own frame, m), whether the
    fingers align with it, and its goal: `place` (m), heights (m) on the way and of release.
    """

    at: int
    grasp: tuple[float, float, float]
    align: bool
    place: tuple[float, float] | None
    carry: float
    release: float


# Sizes and places are those of robosuite's scenes.
TASKS = {
    "lift": Task(0, (0.0, 0.0, 0.0), False, None, 1.0, 0.0),
    "can": Task(7, (0.0, 0.0, 0.02), False, (0.1975, 0.4025), 1.1, 0.92),
    "square": Task(7, (0.054, 0.0, 0.0), True, (0.23, 0.1), 1.02, 0.9),
}


@dataclass(frozen=True)
class Config:
    """Settings of the scripted robosuite policies."""

    task: str  # lift, can or square
    unsteady: NonNegative = 0.1  # standard deviation of the motion noise


class Scripted(Policy):
    """Noise [n, 4] is added to the motion and the turn; the carry holds `stage` and `since` [n]."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        needed = {"object", "robot0_eef_pos", "robot0_eef_quat"}
        if config.task not in TASKS or not needed <= {*spec.obs} or spec.act.shape != (7,):
            raise ConfigError(f"task={config.task}: {', '.join(TASKS)} with env=robosuite_TASK")
        self.spec = spec
        self.config = config
        self.task = TASKS[config.task]
        self.grasp = torch.tensor(self.task.grasp)

    def initial(self, n: int) -> Tensors:
        zeros = torch.zeros(n, dtype=torch.int64)
        return {"stage": zeros, "since": zeros}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, 4)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        found = obs["object"][:, self.task.at :]
        place = found[:, :3]
        quat = found[:, 3:7]
        tool = obs["robot0_eef_pos"]
        turn = frame(obs["robot0_eef_quat"])
        body = frame(quat)
        handle = place + body @ self.grasp
        carry = self._next(carry, tool, place, handle, angle(body))
        stage = carry["stage"]
        move = self._motion(stage, tool, place, handle)
        yaw = self._turn(stage, angle(body), angle(turn))
        motion = torch.cat([move / STEP, (yaw / TURN)[:, None]], 1)
        motion = (motion + self.config.unsteady * noise).clamp(-1, 1)
        hand = torch.where((stage >= CLOSE) & (stage < OPEN), 1.0, -1.0)[:, None]
        level = torch.zeros(len(motion), 2)
        return torch.cat([motion[:, :3], level, motion[:, 3:], hand], 1)[:, None], carry

    def _next(
        self, carry: Tensors, tool: Tensor, place: Tensor, handle: Tensor, yaw: Tensor
    ) -> Tensors:
        """The stage of each env now; `since` counts its steps."""
        stage = carry["stage"]
        since = carry["since"] + 1
        off = tool - handle
        beside = off[:, :2].norm(dim=1)
        far = off.norm(dim=1)
        there = self._over(place, yaw)
        passed = torch.stack(
            [
                (beside < 0.01) & (off[:, 2] < 0.13) & (since > WAIT),
                far < 0.012,
                since > WAIT,
                place[:, 2] > self.task.carry - 0.03,
                there,
                place[:, 2] < self.task.release,
                since > 4 * WAIT,
            ],
            1,
        ).gather(1, stage[:, None])[:, 0]
        if self.task.place is None:
            passed = passed & (stage < UP)
        lost = (stage > CLOSE) & (stage < OPEN) & (far > LOST)
        again = lost | (passed & (stage == OPEN))
        after = torch.where(again, ABOVE, stage + passed.long())
        return {"stage": after, "since": torch.where(after == stage, since, 0)}

    def _over(self, place: Tensor, yaw: Tensor) -> Tensor:
        """Whether an object is above its goal."""
        if self.task.place is None:
            return torch.zeros(len(place), dtype=torch.bool)
        off = (place[:, :2] - torch.tensor(self.task.place)).norm(dim=1)
        square = wrapped(-yaw, math.pi / 2).abs() < 0.05
        return (off < 0.006) & square if self.task.align else off < 0.03

    def _motion(self, stage: Tensor, tool: Tensor, place: Tensor, handle: Tensor) -> Tensor:
        """The motion of the tool, [n, 3] (m)."""
        reach = handle - tool
        above = reach + torch.tensor([0.0, 0.0, 0.1])
        goal = place[:, :2] if self.task.place is None else torch.tensor(self.task.place)
        across = goal - place[:, :2]
        up = (self.task.carry - place[:, 2:]).clamp(-0.2, 0.2)
        still = torch.zeros(len(tool), 2)
        down = torch.full((len(tool), 1), -0.03)
        rise = torch.full((len(tool), 1), STEP)
        ways = [above, reach, 0 * reach]
        ways += [torch.cat([still, up], 1), torch.cat([across, up], 1)]
        ways += [
            torch.cat([across, down], 1),
            torch.cat([still, rise * (stage == OPEN)[:, None]], 1),
        ]
        return torch.stack(ways, 1)[torch.arange(len(tool)), stage]

    def _turn(self, stage: Tensor, body: Tensor, tool: Tensor) -> Tensor:
        """The turn of the tool, [n] (rad)."""
        if not self.task.align:
            return torch.zeros_like(body)
        grasp = wrapped(body - tool, math.pi)
        place = wrapped(-body, math.pi / 2)
        held = (stage >= UP) & (stage < OPEN)
        return torch.where(held, place, grasp * (stage < CLOSE))


def frame(quat: Tensor) -> Tensor:
    """Rotation matrices [n, 3, 3] of quaternions x, y, z, w [n, 4]."""
    x, y, z, w = (quat / quat.norm(dim=1, keepdim=True).clamp(min=1e-6)).unbind(1)
    rows = [
        torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)], 1),
        torch.stack([2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)], 1),
        torch.stack([2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)], 1),
    ]
    return torch.stack(rows, 1)


def angle(turn: Tensor) -> Tensor:
    """The heading of the y axis of rotations [n, 3, 3], [n] (rad)."""
    return torch.atan2(turn[:, 1, 1], turn[:, 0, 1])


def wrapped(value: Tensor, period: float) -> Tensor:
    """`value` in [-period / 2, period / 2)."""
    return (value + period / 2) % period - period / 2
