"""Adversarial Surprise: Explore maximises, Control minimises the surprise of observations.

Two policies act in one environment in alternating turns of k steps. Source: Fickinger et al.,
"Explore and Control with Adversarial Surprise", 2021. The rewards of Control and of Explore are

    r_t = log p_theta(o_t)   in the last part of its turn, then theta counts o_t;
    Explore, at the end of its own turn:   -(what Control gets in the turn that follows)

and nothing else. Each plays its turns as episodes of its own. What is trained, evaluated and kept
as the run's policy is Explore; Control is the second student (rivals.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.moved import attributes
from embodied.teachers.episode_log import EpisodeLog
from embodied.teachers.levels.two_agent import StepSecondAgent


@runtime_checkable
class Expecting(Protocol):
    """A world that counts what it shows, and knows how surprising a picture is."""

    def count(self, on: bool) -> None: ...
    def surprise(self, before: Tensors, after: Tensors) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Config:
    """`turns` of `steps` steps each, Explore's first; after them all worlds begin again. `free`:
    share of Control's turn in which it is not paid."""

    turns: int = 4
    steps: int = 32
    free: float = 0.5


class AdversarialSurprise:
    """Chooses no tasks: it is a game around the world as it is."""

    needs: ClassVar[frozenset[str]] = frozenset({"counts", "rival"})
    node: dict[str, Any]

    def __init__(self, config: Config, env: VecEnv, seed: int = 0) -> None:
        if not isinstance(env, Expecting):
            raise ConfigError(
                "this teacher needs an environment with an episodic density of observations "
                "(envs.wrappers.episodic_density): env=rooms"
            )
        if config.turns < 2 or config.turns % 2 or config.steps < 2:
            raise ConfigError("teacher.turns should be 2, 4, ..., teacher.steps at least 2")
        if not 0 <= config.free < 1:
            raise ConfigError(f"teacher.free={config.free:g} should be at least 0, below 1")
        self.config, self.games, self.dropped = config, 0, 0
        self.control: Control | None = None
        self.explore: Explore | None = None
        self.found = self.paid = 0.0

    def antagonist_env(self, env: VecEnv, make_env: Callable[[], VecEnv]) -> VecEnv:
        self.control = Control(env, self.config)
        return self.control

    def protagonist_env(self, env: VecEnv, log: EpisodeLog | None) -> VecEnv:
        assert self.control is not None, "`antagonist_env` comes first"
        self.explore = Explore(env, self, self.control)
        return self.explore

    def after_step(self, step: Step, step_second: StepSecondAgent) -> Step:
        """With the last step of Explore's turn, Control plays its own."""
        explore = self.explore
        assert explore is not None, "`protagonist_env` comes first"
        return explore.pass_turn(step, step_second) if explore.turn_over else step

    def over(self, found: Tensor, paid: Tensor) -> None:
        """A game has ended: the world's own rewards [B], and what Control was paid in its last
        turn. Nobody is paid the first: where it is not a number, it is only not noted."""
        self.games += 1
        self.paid = float(paid.mean())
        if found.isfinite().all():
            self.found = float(found.mean())
            return
        if not self.dropped:
            warnings.warn("teacher: a world's reward is not a number", stacklevel=2)
        self.dropped += 1

    def metrics(self) -> dict[str, float]:
        return {"games": float(self.games), "world_return": self.found, "control": self.paid}

    def get_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("games", "dropped", "found", "paid")}

    def set_state(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class Control(Wrapper):
    """The world as Control meets it: only its own turns, each an episode. `begin` it with what is
    to be seen; `paid` and `own` [B] are then what it and the world paid."""

    def __init__(self, env: VecEnv, config: Config) -> None:
        super().__init__(env)
        self.config, self.age = config, 0
        self.first = round(config.free * config.steps)
        self.paid = self.own = torch.zeros(self.num_envs, device=self.device)
        self.last: Tensors = {}

    def begin(self, obs: Tensors) -> None:
        self.age, self.last = 0, obs
        self.paid, self.own = torch.zeros_like(self.paid), torch.zeros_like(self.own)

    def step(self, action: Tensor) -> Step:
        world = cast(Any, self.env)
        scored = self.age >= self.first
        world.count(scored)
        step = self.env.step(action)
        self.age += 1
        reward = torch.zeros_like(step.reward)
        if scored:
            reward = -world.surprise(self.last, step.next_obs).to(reward)
        self.paid, self.own, self.last = self.paid + reward, self.own + step.reward, step.obs
        return turned(step, reward, self.age == self.config.steps)


class Explore(Wrapper):
    """Explore's environment: its own turns, each an episode; between them Control's turn passes."""

    def __init__(self, env: VecEnv, teacher: AdversarialSurprise, control: Control) -> None:
        super().__init__(env)
        self.teacher, self.control = teacher, control
        zeros = torch.zeros(self.num_envs, device=self.device)
        # All rows are as far; a tensor, as it is saved with them.
        self.memory = {"age": zeros.long(), "turn": zeros.long(), "own": zeros}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        """A new game."""
        self.memory = {key: torch.zeros_like(value) for key, value in self.memory.items()}
        return self.env.reset(seed, task, mask)

    def step(self, action: Tensor) -> Step:
        """A step of Explore's turn; the one that ends it gets its reward from `pass_turn`."""
        memory = self.memory
        cast(Any, self.env).count(False)
        step = self.env.step(action)
        memory["age"], memory["own"] = memory["age"] + 1, memory["own"] + step.reward
        return turned(step, torch.zeros_like(step.reward), False)

    @property
    def turn_over(self) -> bool:
        return int(self.memory["age"][0]) >= self.teacher.config.steps

    def pass_turn(self, step: Step, step_second: StepSecondAgent) -> Step:
        """Control's whole turn, after `step`, the last of Explore's; `step` with Explore's reward
        and with what it observes next."""
        memory, config, control = self.memory, self.teacher.config, self.control
        control.begin(step.obs)
        for _ in range(config.steps):
            step_second(step.obs if control.age == 0 else None)
        memory["age"], memory["turn"] = torch.zeros_like(memory["age"]), memory["turn"] + 2
        memory["own"] = memory["own"] + control.own
        following, obs = {k: v.clone() for k, v in step.next_obs.items()}, control.last
        if int(memory["turn"][0]) == config.turns:
            self.teacher.over(memory["own"], control.paid)
            obs = self.reset()
        step = replace(step, obs=obs, next_obs=following)
        return turned(step, -control.paid, True)


def turned(step: Step, reward: Tensor, over: bool) -> Step:
    """The same step, paid otherwise; where a turn is over, it ends for all rows."""
    if not over:
        return replace(step, reward=reward)
    ended = torch.ones_like(step.terminated)
    return replace(step, reward=reward, terminated=ended, truncated=~ended)


__getattr__ = attributes(__name__)
