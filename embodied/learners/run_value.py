"""The values of a trained run as a potential: what its policy would get from an observation on.

    V(s) = mean_i mean_k Q_i(s, a_k),   a_k ~ pi(. | s)

Shaping by it (`reward=advantage`) gives a step its advantage r + discount V(s') - V(s), whose sum
over a segment is minus the regret of its actions. CPL (Hejna et al., 2024) takes people to compare
segments by it: a segment that starts near the goal is not better for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.bounds import Count
from embodied.core.build import ConfigError, Node
from embodied.core.device import forked
from embodied.core.reward import End, Potential
from embodied.core.saved_node import read_run_settings
from embodied.core.spec import Spec, require_same
from embodied.core.tensors import Tensors, each, length, under
from embodied.learners.critics import Critic
from embodied.learners.learner import Learner, load_learner

SEED = 0
ROWS = 1024  # observations that policy and critics see at once


@dataclass(frozen=True)
class Config:
    run: str = ""  # run of an online learner with critics of actions, such as sac
    actions: Count = 64  # actions of the run's policy for each observation


def critics_of(run: str, spec: Spec) -> tuple[Learner, Critic, Node]:
    """The learner of a run's newest checkpoint with its critics of actions, and the run's settings.
    ConfigError if it has none, SpecMismatch if they are for other observations or actions."""
    saved = checkpoint.find(run)
    trained = read_run_settings(saved.parent.parent / "run.yaml")
    policy = checkpoint.load_policy(saved)
    require_same(spec, policy.spec, "the recordings", f"the critics of {saved}")
    learner = load_learner(saved, trained, policy).eval()
    critic = getattr(learner, "critic", None)
    if trained.get("finetune") or not isinstance(critic, Critic):
        raise ConfigError(f"{saved} has no critics of actions: train learner=sac, td3_bc or rebrac")
    return learner, critic, trained


class RunValue(Potential):
    """V [N] at one end of transitions, by the newest checkpoint of a run in the same
    environment."""

    def __init__(self, config: Config, spec: Spec) -> None:
        if not config.run:
            raise ConfigError("an advantage is a trained run's: reward.potential.run=RUN")
        learner, critic, _ = critics_of(config.run, spec)
        self.policy = learner.policy
        if self.policy.chunk > 1 or self.policy.initial(1):
            raise ConfigError(f"{config.run}: its policy acts in chunks or has a memory")
        if critic.out != 1:
            raise ConfigError(f"{config.run}: its critics are distributions; train learner=sac")
        self.critic = critic
        self.actions = config.actions

    @torch.no_grad()
    def __call__(self, transitions: Tensors, end: End = "next_obs") -> Tensor:
        obs, device = under(transitions, end), transitions["reward"].device
        self.policy.to(device)
        self.critic.to(device)
        starts = range(0, len(transitions["reward"]), ROWS)
        batches = (each(obs, lambda v, at=at: v[at : at + ROWS]) for at in starts)
        with forked(SEED):  # the same state has the same value, in every place of a batch
            noise = self.policy.sample_noise(self.actions, explore=True)
        return torch.cat([self.value(batch, noise) for batch in batches])

    def value(self, obs: Tensors, noise: Tensor) -> Tensor:
        """V [n] of observations [n, ...], by the actions of `noise` [k, ...]."""
        n, k = length(obs), len(noise)
        many = each(obs, lambda v: v.repeat_interleave(k, 0))
        actions, _ = self.policy.act(many, {}, noise.repeat(n, *[1] * (noise.ndim - 1)))
        return self.critic.each(obs, actions.reshape(n, k, -1)).mean((0, 2))
