"""Interventions: somebody takes over in training, and that they had to is the reward (or nothing).

    r_t = -1 if somebody takes over at t + 1, else 0

RLIF (Luo et al., 2024): no reward of a task, and nobody has to be good at it; what counts is that
they were not content. `pay` "world" leaves the world's reward: learning from demonstrations and
corrections (SERL; Luo et al., 2024; HIL-SERL, 2024). Rows hold the action that was executed, and
`intervened` says whose it was. In evaluation nobody helps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from embodied.core.build import Node, build
from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from policies.scripted.intervener import Intervener


@dataclass(frozen=True)
class Config:
    """`intervener`: policies.scripted.intervener.ProgressIntervener or, on a robot,
    real_robot.teleop.teleop.Teleoperator."""

    intervener: Node
    pay: Literal["interventions", "world"] = "interventions"


class Interventions:
    """Demonstrations are somebody's from beginning to end; nobody took over in them: 0."""

    frozen = True
    extra_columns = ("intervened",)

    def __init__(self, config: Config, num_envs: int, seed: int) -> None:
        self.config, self.num_envs, self.seed = config, num_envs, seed

    def augment_env(self, env: VecEnv) -> VecEnv:
        """The same world with somebody at its side."""
        context = {"spec": env.spec, "num_envs": env.num_envs, "seed": self.seed}
        intervener: Intervener = build(self.config.intervener, **context)
        return InterventionWrapper(env, intervener, self.config.pay == "interventions")

    def __call__(self, rows: Tensors) -> Tensor:
        if self.config.pay == "world":
            return rows["reward"]
        return rows["reward"].clamp(-1.0, 0.0)  # what a demonstration's world paid does not count

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """Nothing is learned."""
        return {}


class InterventionWrapper(Wrapper):
    """`log`: `intervened` (this step was somebody's), `taken` (from the next one on it is),
    `executed` [B, A]."""

    def __init__(self, env: VecEnv, intervener: Intervener, pays: bool) -> None:
        super().__init__(env)
        self.intervener, self.pays = intervener, pays
        self.first = torch.ones(env.num_envs, dtype=torch.bool)
        self.over = torch.zeros(env.num_envs, dtype=torch.bool)
        self.obs: Tensors = {}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        obs = self.env.reset(seed, task, mask)
        self._look(obs, self.rows(mask))
        return obs

    def step(self, action: Tensor) -> Step:
        theirs = self.intervener.act(self.obs, self.first).to(action)
        executed = torch.where(self.over[:, None], theirs, action)
        step, before = self.env.step(executed), self.over
        self._look(step.obs, step.ended)
        taken = self.over & ~before & ~step.ended
        reward = -taken.to(step.reward) if self.pays else step.reward
        # A world may have done something else still, and says so.
        log = {"executed": executed, **step.log, "intervened": before, "taken": taken}
        return replace(step, reward=reward, log=log)

    def _look(self, obs: Tensors, first: Tensor) -> None:
        self.obs, self.first = obs, first
        self.over = self.intervener.over(obs, first)

    def get_state(self) -> dict[str, Any]:
        """People cannot be saved: episodes in flight restart on resume."""
        from embodied.core.env import NotSavable

        raise NotSavable("somebody watches this world, and nobody saves people")
