"""Task spaces, environments and simulated students to check teachers with, by what they need."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.build import build, resolve
from embodied.core.config_fields import complete
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.core.wrapper import Wrapper
from embodied.envs.fr3.env import Config, Fr3
from embodied.envs.maze.env import Config as MazeConfig
from embodied.envs.maze.env import Maze
from embodied.teachers.resets.reset_distribution import DEFAULT_RESET, ResetStateWrapper
from embodied.teachers.teacher import (
    Curriculum,
    Need,
    Outcome,
    StudentEstimates,
    TaskWrapper,
    Teacher,
    TwoAgentTeacher,
)

PLAYER = {"_target_": "embodied.policies.scripted.fr3.Scripted", "task": "reach", "quality": 1.0}
ROWS = 16  # parallel episodes
STEPS = 50  # FR3 reach: its horizon
FILL = "none"  # the mode that fills the archive


def ready(node: Mapping[str, Any], spec: Spec, folder: Path) -> dict[str, Any]:
    """`node` with what users must provide: an archive of two past students, or a second agent."""
    node = complete(node)
    if "archive" not in node:
        return {**node, "player": PLAYER} if "player" in node else dict(node)
    room = folder / "archive"
    if not room.exists():
        for seed in (1, 2):
            past = {**node, "archive": str(room), "stepping": FILL, "epoch": 600}
            teaching(build(past, Teacher, spec=spec, seed=seed), 600)()
    return {**node, "archive": str(room), "epoch": 600, "lively": 0.02}


def teaching(teacher: Teacher, episodes: int) -> Callable[[], int]:
    """Blocks of `episodes` episodes, ROWS in parallel, ending one at a time in random order; the
    student succeeds in a growing part of the task space, and from every saved state."""
    random, played = np.random.default_rng(0), 0
    rival = getattr(teacher, "rival", None)  # the antagonist plays as many episodes
    task, ticket = teacher.sample(ROWS)

    def block() -> int:
        nonlocal played
        for _ in range(episodes):
            row = int(random.integers(ROWS))
            reach = min(0.3 + played / 2000, 1.2)
            far = float(task[row].norm()) if task.is_floating_point() else 0.0
            won = float(random.random() < np.exp(-4 * max(far - reach, 0)))
            teacher.update(ticket[row : row + 1], outcome(won))
            task[row], ticket[row] = (value[0] for value in teacher.sample(1))
            if rival is not None:
                rival.update(rival.sample(1)[1], outcome(1 - won))
            played += 1
        return episodes

    return block


def outcome(score: float) -> Outcome:
    """An episode with return `score`, successful if that is 1; the student's values are half."""
    value = torch.tensor([score])
    return Outcome(value, value, torch.tensor([float(STEPS)]), value / 2, value / 2, value / 2)


SMALL: dict[str, Any] = {
    **{"every": 60, "iterations": 10, "pretrain": 10, "steps": 5, "warmup": 40, "most": 30},
    **{"size": 10, "batch": 16, "episodes": 3, "pool": 64, "latent": 4},
}


def need(target: str) -> Need:
    """What teacher `target` needs of an environment."""
    return resolve(target, Curriculum).needs


def small(target: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` of sizes with which a teacher has learned something after a few dozen episodes."""
    config = typing.get_type_hints(resolve(target, Curriculum).__init__)["config"]
    return {"_target_": target, **_shrunk(config, settings)}


def _shrunk(config: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Whole numbers no larger than those of SMALL, in configurations within it too."""
    kinds, out = typing.get_type_hints(config), dict(settings)
    out.pop("_target_", None)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(kinds[field.name]):
            out[field.name] = _shrunk(kinds[field.name], out.get(field.name, {}))
        elif field.name in SMALL:
            out[field.name] = min(SMALL[field.name], settings.get(field.name, field.default))
    return out


class Box:
    """Three task parameters, one without width, one narrowed."""

    names = ("goal_x", "goal_y", "goal_z")
    low, high = torch.tensor([0.2, 0.5, 0.0]), torch.tensor([0.6, 0.5, 1.0])
    shape: tuple[int, ...] = (3,)

    def node(self, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
        """A YAML's `settings`, ready to be built."""
        box = {self.names[0]: [0.2, 0.6], self.names[1]: [0.5, 0.5]}
        return ready(settings, self.spec, folder) | {"box": box}

    @property
    def spec(self) -> Spec:
        task = Leaf((3,), low=0.0, high=1.0, names=self.names)
        return Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), 0.1, task)

    def context(self) -> dict[str, Any]:
        """What a teacher is built with."""
        return {"spec": self.spec}

    def valid(self, tasks: Tensor, teacher: Any) -> bool:
        """Whether such episodes can be played."""
        inside = (tasks >= self.low - 1e-6) & (tasks <= self.high + 1e-6)
        return tasks.dtype == torch.float32 and bool(inside.all())

    def ease(self, task: Tensor) -> float:
        """How likely a student is to succeed, in the end."""
        return 1.5 - float(task.mean())

    def with_env(self, node: dict[str, Any]) -> tuple[Any, VecEnv]:
        """A teacher and an environment whose episodes are those that it chooses: FR3 reach."""
        env = Fr3(Config(task="reach", num_envs=2, threads=1, horizon=2))
        teacher: Any = build({**node, "signal": "success"}, Curriculum, spec=env.spec, seed=0)
        return teacher, TaskWrapper(env, teacher)


class Help(Box):
    """One of the task parameters is how much help there is."""

    names = ("cube_x", "cube_y", "help")

    def with_env(self, node: dict[str, Any]) -> tuple[Any, VecEnv]:
        """FR3 lift with a magnet."""
        inner = {
            "_target_": "embodied.envs.fr3.env.Fr3",
            "task": "lift",
            "threads": 1,
            "horizon": 2,
        }
        magnet = {"_target_": "embodied.envs.fr3.assist_force.AssistForce", "body": "cube"}
        wrapped = {"_target_": "embodied.envs.wrappers.stack.Wrapped", "num_envs": 2}
        env = build({**wrapped, "env": inner, "wrappers": [magnet]}, VecEnv)
        teacher: Any = build(node, Curriculum, spec=env.spec, seed=0)
        return teacher, TaskWrapper(env, teacher)


class Levels(Box):
    """Small mazes."""

    shape = (28,)

    @functools.cached_property
    def maze(self) -> Maze:
        return Maze(MazeConfig(side=5, blocks=8, num_envs=2, horizon=2))

    def node(self, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
        return settings

    def context(self) -> dict[str, Any]:
        return {"spec": self.maze.spec, "levels": self.maze.levels}

    def valid(self, tasks: Tensor, teacher: Any) -> bool:
        """They can be solved, and are not held out."""
        return tasks.dtype == torch.float32 and bool(
            self.maze.levels.fit(tasks.double().numpy()).all()
        )

    def ease(self, task: Tensor) -> float:
        return 0.7

    def with_env(self, node: dict[str, Any]) -> tuple[Any, VecEnv]:
        """With a second student that stands still, or a first that learns at once."""
        teacher: Any = build(node, Curriculum, **self.context(), seed=0)
        if isinstance(teacher, TwoAgentTeacher):
            other = teacher.antagonist_env(self.maze, lambda: Maze(self.maze.config))
            other.reset(1)
            still = torch.zeros(2, dtype=torch.int64)
            env = teacher.protagonist_env(self.maze, None)
            return teacher, TwoAgents(env, teacher, lambda obs=None: other.step(still))
        if not teacher.uses_estimates:
            return teacher, TaskWrapper(self.maze, teacher)
        return teacher, _Estimated(self.maze, teacher, None, StudentEstimates(teacher))


class TwoAgents(Wrapper):
    """After each step the teacher steps the second agent."""

    def __init__(self, env: VecEnv, teacher: Any, step_second: Any) -> None:
        super().__init__(env)
        self.teacher, self.step_second = teacher, step_second

    def step(self, action: Tensor) -> Step:
        return self.teacher.after_step(self.env.step(action), self.step_second)


class _Estimated(TaskWrapper):
    """The student gives its estimates of every step."""

    def step(self, action: Tensor) -> Any:
        step = super().step(action)
        assert self.estimates is not None
        self.estimates.add_steps(step.log["ticket"], torch.ones(2), torch.zeros(2))
        return step


class States(Box):
    """FR3 reach, whose states can be saved; a script plays."""

    shape = ()

    @functools.cached_property
    def env(self) -> Fr3:
        return Fr3(Config(task="reach", num_envs=2, threads=1, horizon=20))

    def node(self, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
        return ready(settings, self.spec, folder) | {"every": 2}

    def context(self) -> dict[str, Any]:
        return {"spec": self.env.spec, "env": self.env}

    def valid(self, tasks: Tensor, teacher: Any) -> bool:
        """A saved state's number, or the environment's own initial state."""
        known = (tasks == DEFAULT_RESET) | ((tasks >= 0) & (tasks < len(teacher.paths)))
        return tasks.dtype == torch.int64 and bool(known.all())

    def ease(self, task: Tensor) -> float:
        return 0.7

    def with_env(self, node: dict[str, Any]) -> tuple[Any, VecEnv]:
        teacher: Any = build(
            {**node, "limit": 2, "usual": 0.0, "steps": 0}, Curriculum, **self.context(), seed=0
        )
        return teacher, ResetStateWrapper(self.env, teacher)


KINDS: dict[str, Box] = {"tasks": Box(), "help": Help(), "levels": Levels(), "states": States()}
GAME = "counts"
"""What the teachers need that choose no tasks, but have two policies act in turns."""
