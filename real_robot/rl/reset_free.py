"""Reset-free RL on a real robot (autonomous RL), for `embodied.envs.reset_free.wrapper`.

Goals are numbers that the policy is given (`goal_x ...`), one set after the other: there, and back
again. The tool, or an object whose position is sensed, has to reach the goal. Between episodes the
arm goes home through the safety chain; nothing else is reset (forward and backward tasks of SERL;
Luo et al., 2024). When an object leaves its `area`, training waits until a person puts it back.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Bound, Number
from embodied.core.build import ConfigError, Node
from embodied.core.tensors import Tensors
from embodied.real_robot.assemble import forward_kinematics
from embodied.real_robot.kernel.messages import Mode
from embodied.real_robot.policy.observer import GOAL
from embodied.real_robot.rl import robot_env
from embodied.real_robot.rl.session import RobotSessionError

ENDLESS = 1 << 40  # steps
Corner = tuple[Number, Number, Number]


class Facts(NamedTuple):
    """Of the one row: where the thing is [1, 3] (m), and [1] (bool) what is so."""

    place: Tensor
    reached: Tensor
    crashed: Tensor
    lost: Tensor


@dataclass(frozen=True, kw_only=True)
class Config(robot_env.ArmConfig):
    """Settings of a robot that trains without resets. `given` numbers that are ranges are drawn
    anew for every goal; a goal's own values name `goal_x`, `goal_y`, `goal_z` (m) and the same
    other numbers as all goals."""

    goals: tuple[Mapping[str, Number], ...]  # what is given on the way to each goal
    thing: str = "tool"  # what goes to the goal: tool, or what is sensed as NAME_x, NAME_y, NAME_z
    within: Annotated[float, Bound(above=0.0, high=10.0)] = 0.025  # m of the goal
    area: tuple[Corner, Corner] | None = None  # box (low, high; m) that the arm reaches; null: any
    retreat: Annotated[int, Bound(0, 1000)] = 10  # steps straight up before the arm goes home

    def __post_init__(self) -> None:
        if len(self.goals) < 2 or any(not {*GOAL} <= {*goal} for goal in self.goals):
            raise ConfigError(
                "reset-free training needs two goals or more, each with goal_x, goal_y, goal_z"
            )
        if any({*goal} != {*self.goals[0]} for goal in self.goals):
            raise ConfigError("all goals should have the same names")


class ResetFreeRobotEnv(robot_env.RealEnv):
    """Never ends by itself but with a latched stop. The reward is 1 where the goal is reached."""

    def __init__(self, config: Config) -> None:
        first = {name: (value, value) for name, value in config.goals[0].items()}
        settings = {each.name: getattr(config, each.name) for each in fields(robot_env.ArmConfig)}
        settings |= {"robot": lasting(config.robot), "given": {**config.given, **first}}
        super().__init__(robot_env.Config(**settings, horizon=ENDLESS))
        self.practice = config
        self.goal = torch.zeros(1, dtype=torch.int64)
        seen = {"tool_x", *self.deployment.sensed}
        if "dz" not in self.spec.act.names:
            raise ConfigError(
                "reset-free training moves up by dz, which this environment's actions lack"
            )
        if f"{config.thing}_x" not in seen:
            raise ConfigError(
                f"the position of the {config.thing} is not sensed (thing: tool needs no sensor)"
            )

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        obs = super().reset(seed, task, mask)
        deadline = time.monotonic() + self.practice.patience
        if bool(self.facts().lost[0]):
            text = f"the {self.practice.thing} is out of reach: put it back"
            print(text, file=sys.stderr, flush=True)
        while bool(self.facts().lost[0]):
            if time.monotonic() > deadline:
                raise RobotSessionError(f"the {self.practice.thing} was not put back")
            time.sleep(0.1)
            with self.session.lock:
                self.session.update()
                obs = self._observe()
        return obs

    def facts(self) -> Facts:
        place = self._place()
        goal = self.practice.goals[int(self.goal[0])]
        near = float(np.linalg.norm(place - [goal[name] for name in GOAL])) < self.practice.within
        area = self.practice.area
        out = area is not None and not ((place >= area[0]) & (place <= area[1])).all()
        lost = bool(out) or not np.isfinite(place).all()
        never = torch.zeros(1, dtype=torch.bool)
        shown = torch.tensor(place, dtype=torch.float32)[None]
        return Facts(shown, torch.tensor([near and not lost]), never, torch.tensor([lost]))

    def advance(self, rows: Tensor) -> None:
        if bool(rows[0]):
            self.goal = (self.goal + 1) % len(self.practice.goals)
            self._aim()

    def rehome(self, rows: Tensor) -> None:
        """The arm comes to rest, goes home, and may move again."""
        if bool(rows[0]):
            with self.session.lock:
                self.deadman.pause()
                self._begin_episode()

    def look(self) -> Tensors:
        return self._observe()

    def _begin_episode(self) -> None:
        if self.session.owner is self and self.session.mode == Mode.RUNNING:
            up = np.zeros(self.spec.act.size)
            up[self.spec.act.names.index("dz")] = 1.0
            for _ in range(self.practice.retreat):
                self._apply_action(up)
            self.deadman.pause()
        super()._begin_episode()
        self._aim()

    def _aim(self) -> None:
        self.observer.given.update(self.practice.goals[int(self.goal[0])])
        self.success.given = dict(self.observer.given)

    def _evaluate(self, stopped: bool) -> tuple[tuple[bool, bool], float, Tensors]:
        _, _, log = super()._evaluate(stopped)
        reached = bool(self.facts().reached[0]) and not stopped
        return (False, stopped), float(reached), {**log, "success": torch.tensor([reached])}

    def _place(self) -> np.ndarray[Any, Any]:
        fields, thing = self.session.state, self.practice.thing
        if thing == "tool":
            return np.asarray(forward_kinematics(self.deployment)(np.array(fields["q"])[None])[0])
        values = dict(zip(self.deployment.sensed, fields["sensed"].tolist(), strict=True))
        return np.array([values[f"{thing}_{axis}"] for axis in "xyz"])


def lasting(robot: Node) -> Node:
    """Where a simulated world stands before the arm, nothing in it is put back."""
    driver = robot.get("driver", {})
    if not driver.get("world"):
        return robot
    return {**robot, "driver": {**driver, "world": {**driver["world"], "lasting": True}}}
