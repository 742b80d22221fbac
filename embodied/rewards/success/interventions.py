"""Interventions: a (scripted or human) operator takes over during training; that is the reward.

    r_t = -1 if the operator takes over at t + 1, else 0

RLIF (Luo et al., 2024): needs neither a task reward nor an expert operator. With `pay` "env" the
environment's reward is kept: learning from demonstrations and corrections (SERL; Luo et al., 2024;
HIL-SERL, 2024). Transitions hold the executed action; `intervened` marks the operator's. There are
no interventions in evaluation. RLIF's random intervener and the one by a reference
policy's value are not here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from embodied.core.build import Node, build
from embodied.core.env import NotSavable, Step, VecEnv
from embodied.core.reward import Reward
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.policies.scripted.intervener import Intervener


@dataclass(frozen=True)
class Config:
    """Settings of interventions. The intervener is a
    `embodied.policies.scripted.intervener.ProgressIntervener` or, on a robot, a
    `embodied.real_robot.teleop.teleop.TeleopIntervener`."""

    intervener: Node  # the operator
    pay: Literal["interventions", "env"] = "interventions"  # reward; "env": the environment's


class Interventions(Reward):
    """Demonstrations are the operator's throughout and have no takeover: reward 0."""

    frozen = True
    extra_columns = ("intervened",)

    def __init__(self, config: Config, num_envs: int, seed: int) -> None:
        self.config = config
        self.sums_steps = config.pay == "env"
        self.num_envs = num_envs
        self.seed = seed

    def augment_env(self, env: VecEnv) -> VecEnv:
        context = {"spec": env.spec, "num_envs": env.num_envs, "seed": self.seed}
        intervener = build(self.config.intervener, Intervener, **context)
        return InterventionWrapper(env, intervener, self.config.pay == "interventions")

    def __call__(self, transitions: Tensors) -> Tensor:
        if self.config.pay != "interventions":
            return transitions["reward"]
        pays = transitions["reward"] * ~transitions["intervened"]  # not what a demonstration's task
        return pays.clamp(-1.0, 0.0)


@dataclass(frozen=True)
class CorrectionsConfig:
    """Settings of corrections while recordings are collected."""

    intervener: Node  # the operator


class InterventionWrapper(Wrapper):
    """Replaces actions while the operator intervenes. `log`: `intervened` (this action was the
    operator's), `taken` (the operator takes over at the next step), `executed` [B, A]."""

    def __init__(self, env: VecEnv, intervener: Intervener, rewards_takeover: bool) -> None:
        super().__init__(env)
        self.intervener = intervener
        self.rewards_takeover = rewards_takeover
        self.first = torch.ones(env.num_envs, dtype=torch.bool)
        self.over = torch.zeros(env.num_envs, dtype=torch.bool)
        self.obs: Tensors = {}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        obs = self.env.reset(seed, task, mask)
        self._query_operator(obs, self.rows(mask))
        return obs

    def step(self, action: Tensor) -> Step:
        theirs = self.intervener.act(self.obs, self.first).to(action)
        executed = torch.where(self.over[:, None], theirs, action)
        step, before = self.env.step(executed), self.over
        # The environment may have executed another action still, and logs it.
        executed = step.log.get("executed", executed)
        self.intervener.executed(executed)
        self._query_operator(step.obs, step.ended)
        taken = self.over & ~before & ~step.ended
        reward = -taken.to(step.reward) if self.rewards_takeover else step.reward
        log = {**step.log, "executed": executed, "intervened": before, "taken": taken}
        return replace(step, reward=reward, log=log)

    def _query_operator(self, obs: Tensors, first: Tensor) -> None:
        self.obs = obs
        self.first = first
        self.over = self.intervener.over(obs, first)

    def get_state(self) -> dict[str, Any]:
        """Raises NotSavable: running episodes restart on resume."""
        raise NotSavable("an operator's state cannot be saved")

    def close(self) -> None:
        self.intervener.close()
        super().close()


class Corrections(InterventionWrapper):
    """`embodied demos collect corrections=NODE`: the operator's steps are recorded as such."""

    def __init__(self, config: CorrectionsConfig, env: VecEnv) -> None:
        context = {"spec": env.spec, "num_envs": env.num_envs, "seed": 0}
        super().__init__(env, build(config.intervener, Intervener, **context), False)
