"""Shuttle: reset-free pushing, the FR3 moves a cube to one goal and back.

The goal is part of the observation, so one policy learns both directions. Between episodes the arm
returns home as a real one does (instantaneously here); the cube stays where it is (forward and
backward tasks: SERL; Luo et al., 2024). `embodied.envs.reset_free.wrapper` splits the interaction
into episodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Number
from embodied.core.build import ConfigError
from embodied.core.env import GoalSpace
from embodied.core.tensors import Tensors
from embodied.envs.fr3 import env as fr3_env
from embodied.envs.mujoco.batch_env import Floats, Outcome, Rows
from embodied.envs.reset_free.wrapper import Facts

ENDLESS = 1 << 40  # steps
HOME = (0.45, 0.0, 0.25)  # m, of the tool
THING = "cube"


Place = tuple[Number, Number]
Point = tuple[Number, Number, Number]


@dataclass(frozen=True)
class Config(fr3_env.Config):
    """Settings as in `embodied.envs.fr3.env.Config`, for a task with a cube and a goal."""

    task: str = "push"  # a task with a cube and a goal
    places: tuple[Place, ...] = ((0.44, -0.08), (0.54, 0.08))  # goals in turn (x, y), m
    area: tuple[Point, Point] = ((0.33, -0.25, 0.0), (0.68, 0.25, 0.1))  # box in reach, m


class Shuttle(fr3_env.Fr3):
    """Episodes never end by themselves; the initial cube position is random (`ranges`)."""

    def __init__(self, config: Config) -> None:
        if len(config.places) < 2:
            raise ConfigError("shuttle: places must list at least two goals")
        super().__init__(replace(config, horizon=ENDLESS))
        if THING not in self._free or "goal" not in self._markers:
            raise ConfigError(f"shuttle: task {config.task} has no cube with a goal; set task=push")
        self.places = np.array(config.places)
        self.area = np.array(config.area)
        self.goal = torch.zeros(self.num_envs, dtype=torch.int64)

    def outcome(self, action: Floats) -> Outcome:
        """Reward of the task; success is defined by the reset-free wrapper."""
        made = super().outcome(action)
        never = np.zeros(self.num_envs, np.bool_)
        return Outcome(made.reward, never, {k: v for k, v in made.log.items() if k != "success"})

    def goal_space(self) -> GoalSpace:
        raise ConfigError("shuttle has no goals that could be replaced: no episode ends at one")

    def place(self, rows: Rows, draws: Floats) -> None:
        super().place(rows, draws)
        self.goal[torch.from_numpy(rows)] = 0
        self._aim(rows)

    def facts(self) -> Facts:
        """Facts for `embodied.envs.reset_free.wrapper`."""
        view = self.view(np.arange(self.num_envs))
        cube = view.place[THING]
        lost = ((cube < self.area[0]) | (cube > self.area[1])).any(1)
        reached = torch.from_numpy(np.asarray(self.what.success(view)) & ~lost)
        never = torch.zeros_like(reached)
        return Facts(torch.from_numpy(cube.copy()).float(), reached, never, torch.from_numpy(lost))

    def advance(self, rows: Tensor) -> None:
        """Select the next goal of `rows` [B] (bool)."""
        self.goal = torch.where(rows, (self.goal + 1) % len(self.places), self.goal)
        self._aim(np.flatnonzero(rows.numpy()))

    def rehome(self, rows: Tensor) -> None:
        index = np.flatnonzero(rows.numpy())
        if not len(index):
            return
        q = self._start.reach(np.tile(HOME, (len(index), 1)))
        closed = np.zeros(len(index))
        self.batch.qpos[index, :9] = np.concatenate([q, np.zeros((len(index), 2))], 1)
        self.batch.qvel[index, :9] = 0.0
        self.batch.ctrl[index, :7] = q
        self.batch.ctrl[index, 7] = 0.0
        for key, value in self.controller.begin(q, closed).items():
            self.memory[key][index] = value
        self.batch.forward(index)

    def look(self) -> Tensors:
        self._obs = self._observe(np.arange(self.num_envs))
        return self._obs

    def get_state(self) -> Tensors:
        return {**super().get_state(), "shuttle": self.goal.clone()}

    def set_state(self, state: Tensors) -> Tensors:
        self.goal = state["shuttle"].clone()
        return super().set_state({k: v for k, v in state.items() if k != "shuttle"})

    def _aim(self, rows: Rows) -> None:
        at = self._markers["goal"]
        self.batch.mocap_pos[rows, at, :2] = self.places[self.goal.numpy()[rows]]
