"""Rival: a second student, of the same kind as the first, whom a teacher lets play beside it.

It has a policy, a learner and a rollout of its own. Its steps are steps of the run, its checkpoint
is part of the loop's; what is evaluated and deployed is the first student.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.learners.learner import Learner
from embodied.training.collector import Rollout
from embodied.training.config import RunConfig
from embodied.training.on_policy import RolloutLoop

OTHER = 1_000_003  # between the seeds of the two students' worlds


class Rival:
    """`tells` is what to log of the teacher, after an update of the first student."""

    def __init__(
        self,
        config: RunConfig,
        world: VecEnv,
        device: torch.device,
        tells: Callable[[], dict[str, float]],
    ) -> None:
        if distributed.world() > 1:
            raise ConfigError("a teacher with a second student is for one process, not torchrun")
        policy: Policy = build(config.policy, spec=world.spec)
        self.learner: Learner = build(
            config.learner,
            policy=policy,
            spec=policy.spec,
            total_steps=config.steps,
            execute=config.execute,
            total_decisions=config.steps // (config.execute or policy.chunk),
        ).to(device)
        seed = config.seed + OTHER
        rollout = Rollout(world, policy, self.learner.gamma, 1, config.execute, seed)
        self.loop, self.tells = RolloutLoop(rollout, self.learner), tells
        self.made = 0  # steps that nobody has counted
        self.newest: dict[str, Tensor] = {}

    def play(self, obs: Tensors | None = None) -> None:
        """One step of all its rows, and an update where one is due. `obs` is what it sees, where
        that is not what its last step showed: somebody else moved since."""
        if obs is not None:
            self.loop.rollout.obs = obs
        metrics, step = self.loop.advance()
        self.made += len(step.reward)
        if metrics:
            self.newest = {f"rival_{key}": value for key, value in metrics.items()}

    def told(self, metrics: dict[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
        made, self.made = self.made, 0
        if not metrics:
            return made, metrics
        how = {f"teacher_{key}": torch.tensor(value) for key, value in self.tells().items()}
        return made, metrics | self.newest | how

    def get_state(self) -> dict[str, Any]:
        return {"learner": self.learner.get_state(), "loop": self.loop.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on exactly from `get_state`."""
        self.learner.set_state(state["learner"])
        self.loop.set_state(state["loop"])
        if state["loop"]["rollout"] is None:
            self.loop.rollout.restart()
