"""PickCube: a script for ManiSkill's PickCube: above the cube, down, close, to the goal.

It reads the flat state by element names and moves the gripper by position differences
(`control_mode: pd_ee_delta_pos`; an action of 1 is `reach` metres).

MetaWorld: scripts for five tasks of MetaWorld v3, on its own observation of 39 numbers.

Source: MetaWorld (Yu et al., 2019), whose package has such scripts; its offsets from the handles of
door and drawer are used here. A script is a list of phases, each of which moves the hand (an action
of 1 is about 1 cm a step) towards a place beside the object or the goal and ends there. An object
that is lost on the way is reached for again.

Robosuite: scripts for robosuite's Lift, Can and Square: reach, grasp, lift, move, place.

They read robomimic's low-dimensional observations and move the tool by position and yaw differences
(OSC_POSE: an action of 1 is 5 cm, or 0.5 rad). Each env has a stage, which waits for a distance or
for the gripper. An object that is lost on the way is reached for again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import NonNegative, Positive
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.policies.scripted.simple import Script

PICK_CUBE = {"cube": "extra_tcp_to_obj_pos", "goal": "extra_obj_to_goal_pos"}
GRASPED = "extra_is_grasped"


@dataclass(frozen=True)
class PickCubeConfig:
    """Settings of the scripted cube picker."""

    unsteady: NonNegative = 0.1  # standard deviation of the motion noise
    reach: Positive = 0.1  # tool motion of an action of 1, m
    close: Positive = 0.015  # distance of tool and cube at which the gripper closes, m


class PickCube(Script):
    """Noise is added to the motion; the demonstrator has no memory."""

    width = 3

    def __init__(self, config: PickCubeConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        names = spec.obs["state"].names if "state" in spec.obs else ()
        if spec.act.shape != (4,) or any(f"{name}[0]" not in names for name in PICK_CUBE.values()):
            raise ConfigError(
                "this demonstrator needs env.id=PickCube-v1, obs=state and "
                "control_mode=pd_ee_delta_pos"
            )
        self.at = {key: names.index(f"{name}[0]") for key, name in PICK_CUBE.items()}
        self.grasped = names.index(GRASPED)

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


HAND = slice(0, 3)
OBJECT = slice(4, 7)
GOAL = slice(36, 39)
META_WORLD_LOST = 0.12  # m between the hand and an object that it carries


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
META_WORLD = {
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
class MetaWorldConfig:
    """Settings of the scripted Meta-World policies."""

    task: str  # one of META_WORLD
    unsteady: NonNegative = 0.1  # standard deviation of the motion noise


class Staged(Script):
    """A script in stages. Noise is added to the motion; the carry holds the `stage` of each env and
    `since` when it has it, [n] (int64, steps)."""

    def initial(self, n: int) -> Tensors:
        zeros = torch.zeros(n, dtype=torch.int64)
        return {"stage": zeros, "since": zeros}


class MetaWorld(Staged):
    """Moves the hand from phase to phase of its task."""

    width = 3

    def __init__(self, config: MetaWorldConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        state = spec.obs.get("state")
        if config.task not in META_WORLD or state is None or state.shape != (39,):
            raise ConfigError(
                f"task={config.task}: {', '.join(META_WORLD)} of env=envpool_metaworld_TASK"
            )
        phases = META_WORLD[config.task]
        self.last = len(phases) - 1
        self.offset = torch.tensor([phase.offset for phase in phases])
        self.near = torch.tensor([phase.near for phase in phases])
        numbers = [(p.hand, p.gain, p.wait, p.to_goal, p.holds) for p in phases]
        self.numbers = torch.tensor(numbers, dtype=torch.float32)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        state = obs["state"]
        stage = carry["stage"]
        _, _, wait, _, holds = self.numbers[stage].unbind(1)
        off = self._offset_to_phase(state, stage)
        near = torch.stack([off[:, :2].norm(dim=1), off[:, 2].abs()], 1) < self.near[stage]
        passed = near.all(1) & (carry["since"] >= wait) & (stage < self.last)
        lost = (holds > 0) & ((state[:, HAND] - state[:, OBJECT]).norm(dim=1) > META_WORLD_LOST)
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


ABOVE, DOWN, CLOSE, UP, OVER, LOWER, OPEN = range(7)
STEP = 0.05  # m of an action of 1
TURN = 0.5  # rad of an action of 1
WAIT = 8  # steps that the gripper takes
LOST = 0.1  # m between the tool and where it has grasped


@dataclass(frozen=True)
class RobosuiteTask:
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
ROBOSUITE = {
    "lift": RobosuiteTask(0, (0.0, 0.0, 0.0), False, None, 1.0, 0.0),
    "can": RobosuiteTask(7, (0.0, 0.0, 0.02), False, (0.1975, 0.4025), 1.1, 0.92),
    "square": RobosuiteTask(7, (0.054, 0.0, 0.0), True, (0.23, 0.1), 1.02, 0.9),
}


@dataclass(frozen=True)
class RobosuiteConfig:
    """Settings of the scripted robosuite policies."""

    task: str  # lift, can or square
    unsteady: NonNegative = 0.1  # standard deviation of the motion noise


class Robosuite(Staged):
    """Reaches, grasps, lifts, moves and places; noise is that of the turn too."""

    width = 4

    def __init__(self, config: RobosuiteConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        needed = {"object", "robot0_eef_pos", "robot0_eef_quat"}
        if config.task not in ROBOSUITE or not needed <= {*spec.obs} or spec.act.shape != (7,):
            raise ConfigError(f"task={config.task}: {', '.join(ROBOSUITE)} with env=robosuite_TASK")
        self.task = ROBOSUITE[config.task]
        self.grasp = torch.tensor(self.task.grasp)

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
