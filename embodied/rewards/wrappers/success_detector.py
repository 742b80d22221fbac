"""Wrappers that end an episode as a success when a success classifier says so.

Where the environment cannot tell success (a robot without a sensor for it), the detector is what
evaluation counts, too: `log["success"]`. Where it can, that stays as it is, and `log["detected"]`
can be compared with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.bounds import Count
from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.rewards.fitted import require_observed
from embodied.rewards.success.model import read
from embodied.rewards.wrappers.added_observations import with_pictures


class NoTerminationWrapper(Wrapper):
    """Turns `terminated` into `truncated`. Episodes end as before, but the value of the final
    state is bootstrapped.

    If an environment terminates on success, a learner that sees terminations is rewarded or
    punished for finishing, whatever the reward function says (VLM-RM; Rocamonde et al., 2024).
    """

    hides_terminations = True

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        return replace(step, terminated=torch.zeros_like(step.terminated), truncated=step.ended)


class SuccessDetector(Wrapper):
    """Terminates an episode once `detect(next_obs)` [B] (bool) was true in `steps` consecutive
    steps."""

    def __init__(self, env: VecEnv, detect: Callable[[Tensors], Tensor], steps: int) -> None:
        super().__init__(env)
        self.detect = detect
        self.steps = steps
        self.memory = {"passed": torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        obs = self.env.reset(seed, task, mask)
        self.memory = {"passed": self.memory["passed"].masked_fill(self.rows(mask), 0)}
        return obs

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        now = self.detect(step.next_obs).to(self.device)
        passed = torch.where(now, self.memory["passed"] + 1, 0)
        won = passed >= self.steps
        step = self.begun_anew(step, won & ~step.ended)
        self.memory = {"passed": passed.masked_fill(won | step.ended, 0)}
        return replace(
            step,
            terminated=step.terminated | won,
            truncated=step.truncated & ~won,
            log={"success": won, **step.log, "detected": won},
        )


@dataclass(frozen=True)
class Config:
    """Settings of the success detector."""

    trained: str  # folder of `embodied reward classifier`
    steps: Count = 3  # consecutive steps in which a success must be detected


class DetectSuccess(SuccessDetector):
    """A success classifier that is not trained further, for use in an environment's YAML."""

    def __init__(self, config: Config, env: VecEnv) -> None:
        self.net, self.leaves, self.calibration, _ = read(Path(config.trained))
        require_observed(self.leaves, env.spec)
        super().__init__(with_pictures(env, self.leaves), self._passes, config.steps)

    @torch.no_grad()
    def _passes(self, obs: Tensors) -> Tensor:
        seen = tt.to({name: obs[name] for name in self.leaves}, "cpu")
        return self.calibration.probability(self.net(seen)) > self.calibration.threshold
