"""Adversarial Surprise: Explore maximises, Control minimises the surprise of observations.

Fickinger et al., "Explore and Control with Adversarial Surprise", 2021. Two policies act in one
environment in alternating turns of k steps. Their rewards are

    Control: r_t = log p_theta(o_t) in the last part of its turn; theta is then updated with o_t
    Explore: minus the sum of Control's rewards in the following turn, at the end of its own turn

The environment's reward is not used. Each turn is one episode of its policy. Explore is the run's
policy, which is evaluated and saved; Control is the second agent (`TwoAgentTeacher`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from embodied.core.bounds import Bound
from embodied.core.build import ConfigError
from embodied.core.env import Step, VecEnv
from embodied.core.remembered import Remembered
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.teachers.teacher import Curriculum, EpisodeLog, StepSecondAgent, TwoAgentTeacher


@runtime_checkable
class Expecting(Protocol):
    """An environment with an episodic density model of its observations: `count` switches its
    updates on or off; `surprise` [B] is -log p(`after`) under the model stored in `before`."""

    def count(self, on: bool) -> None: ...
    def surprise(self, before: Tensors, after: Tensors) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of Adversarial Surprise. After `turns` all parallel envs are reset."""

    turns: Annotated[int, Bound(2)] = 4  # turns per episode, the first one Explore's; even
    steps: Annotated[int, Bound(2)] = 32  # steps per turn
    free: Annotated[float, Bound(0.0, below=1.0)] = 0.5  # share of Control's turn without reward


class AdversarialSurprise(Remembered, Curriculum, TwoAgentTeacher):
    """A two-agent teacher (`TwoAgentTeacher`); it does not choose tasks."""

    needs = "counts"
    remembered = ("games", "dropped", "found", "paid")
    node: dict[str, Any]

    def __init__(self, config: Config, env: VecEnv, seed: int = 0) -> None:
        if not isinstance(env, Expecting):
            raise ConfigError(
                "this teacher needs an environment with an episodic density of observations "
                "(embodied.envs.wrappers.episodic_density): env=rooms"
            )
        if config.turns % 2:
            raise ConfigError(f"teacher.turns={config.turns} should be an even number")
        self.config = config
        self.games = 0
        self.dropped = 0
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
        """At the last step of Explore's turn, run Control's turn."""
        explore = self.explore
        assert explore is not None, "`protagonist_env` comes first"
        over = int(explore.memory["age"][0]) >= self.config.steps
        return explore.pass_turn(step, step_second) if over else step

    def over(self, found: Tensor, paid: Tensor) -> None:
        """Log the end of an environment episode: the environment's return `found` [B], and
        Control's return in its last turn `paid` [B]. `found` is skipped if it is not finite."""
        self.games += 1
        self.paid = float(paid.mean())
        if found.isfinite().all():
            self.found = float(found.mean())
            return
        if not self.dropped:
            warnings.warn(
                "teacher: an environment reward is not finite; world_return skips this episode",
                stacklevel=2,
            )
        self.dropped += 1

    def metrics(self) -> dict[str, float]:
        return {"games": float(self.games), "world_return": self.found, "control": self.paid}


class Control(Wrapper):
    """Control's environment: each of its turns is an episode, started by `begin` with the current
    observation. `paid` and `own` [B]: Control's and the environment's return in this turn."""

    def __init__(self, env: VecEnv, config: Config) -> None:
        super().__init__(env)
        self.config = config
        self.age = 0
        self.first = round(config.free * config.steps)
        self.paid = self.own = torch.zeros(self.num_envs, device=self.device)
        self.last: Tensors = {}

    def begin(self, obs: Tensors) -> None:
        self.age = 0
        self.last = obs
        self.paid = torch.zeros_like(self.paid)
        self.own = torch.zeros_like(self.own)

    def step(self, action: Tensor) -> Step:
        world = cast(Any, self.env)
        scored = self.age >= self.first
        world.count(scored)
        step = self.env.step(action)
        self.age += 1
        reward = torch.zeros_like(step.reward)
        if scored:
            reward = -world.surprise(self.last, step.next_obs).to(reward)
        self.paid = self.paid + reward
        self.own = self.own + step.reward
        self.last = step.obs
        return turned(step, reward, self.age == self.config.steps)


class Explore(Wrapper):
    """Explore's environment: each of its turns is an episode; Control's turn is run in between."""

    def __init__(self, env: VecEnv, teacher: AdversarialSurprise, control: Control) -> None:
        super().__init__(env)
        self.teacher = teacher
        self.control = control
        zeros = torch.zeros(self.num_envs, device=self.device)
        # The same for all parallel envs; a tensor [B], because it is saved with the env state.
        self.memory = {"age": zeros.long(), "turn": zeros.long(), "own": zeros}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        """Reset the environment; the next turn is Explore's first."""
        self.memory = {key: torch.zeros_like(value) for key, value in self.memory.items()}
        return self.env.reset(seed, task, mask)

    def step(self, action: Tensor) -> Step:
        """One step of Explore's turn; `pass_turn` adds the reward of its last step."""
        memory = self.memory
        cast(Any, self.env).count(False)
        step = self.env.step(action)
        memory["age"], memory["own"] = memory["age"] + 1, memory["own"] + step.reward
        return turned(step, torch.zeros_like(step.reward), False)

    def pass_turn(self, step: Step, step_second: StepSecondAgent) -> Step:
        """Run Control's turn after `step`, the last one of Explore's turn. Returns `step` with
        Explore's reward and the first observation of its next turn."""
        memory = self.memory
        config = self.teacher.config
        control = self.control
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
    """`step` with `reward` [B]; if the turn is `over`, it is terminal in all parallel envs."""
    if not over:
        return replace(step, reward=reward)
    ended = torch.ones_like(step.terminated)
    return replace(step, reward=reward, terminated=ended, truncated=~ended)
