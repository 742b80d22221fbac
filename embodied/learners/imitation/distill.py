"""Distill: one Gaussian policy from several trained ones, on the states that it visits itself.

The third stage of COMPASS (Liu et al., 2025): specialists of several bodies, each a residual on one
base, become one policy that observes the body. With the teacher k(o) of an observation,

    L = mean_o sum_i KL(N(m_k(o)_i, s_k(o)_i^2) || N(m(o)_i, s_i^2))

over the elements i of the action, before clipping or tanh. An element of which the
teacher is sure (small s_k) weighs more than in a squared error. The authors roll the specialists
out and train on those states; here the student collects its own (DAgger; Ross et al., 2011).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from embodied.core.bounds import Count, Fraction, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.checkpoint import load_policy
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.learner import Learner
from embodied.nn.optim import Adam
from embodied.policies.abilities import HasGaussian
from embodied.policies.diagonal_gaussian import normal_kl


@dataclass(frozen=True)
class Config:
    teachers: tuple[str, ...] = ()  # run folders
    which: str = "privileged/body"  # observation: the number of the teacher, if there are several
    batch_size: Count = 1024  # observations per update
    lr: PositiveFraction = 1e-3  # Adam's learning rate
    gamma: Fraction = 0.99  # discount of the logged rewards; nothing is learned from them


class Distill(Learner):
    """Trained from a replay buffer. A teacher may observe less than the student."""

    data = "off_policy"
    usual_policy = "diagonal_gaussian"

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__(config, policy)
        if not config.teachers:
            raise ConfigError('learner.teachers names trained runs: "learner.teachers=[RUN,RUN]"')
        if len(config.teachers) > 1 and config.which not in spec.obs:
            raise ConfigError(
                f"learner.which: no observation {config.which!r} tells which of "
                f"{len(config.teachers)} teachers to follow"
            )
        as_gaussian(policy, "policy")
        teachers = [teacher_of(run, spec) for run in config.teachers]
        self.teachers = nn.ModuleList(teachers)
        for run, teacher in zip(config.teachers, teachers, strict=True):
            if as_gaussian(teacher, run).squashed != as_gaussian(policy, "policy").squashed:
                raise ConfigError(
                    f"{run} is a {type(teacher).__name__}, the student a {type(policy).__name__}: "
                    "only one of them squashes its actions; take a policy of the teacher's kind"
                )
        self.optims["adam"] = Adam(policy.parameters(), config.lr, partial=True)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        obs = under(batch, "obs")
        kl = self.kl(obs)
        loss = kl.mean()
        self.descend("adam", loss)
        return {"kl_loss": loss.detach(), "worst_kl": kl.detach().amax()}

    def kl(self, obs: Tensors) -> Tensor:
        """KL of the student from the teacher of each observation, [n], in nats."""
        mean, log_std = as_gaussian(self.policy, "policy").gaussian(obs)
        return normal_kl(*self.taught(obs), mean, log_std).sum(1)

    @torch.no_grad()
    def taught(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """Mean and log std, [n, A] each, of the teacher of each observation."""
        each = [cast(HasGaussian, teacher).gaussian(obs) for teacher in self.teachers]
        means = torch.stack([mean for mean, _ in each])
        log_stds = torch.stack([log_std for _, log_std in each])
        if len(each) == 1:
            return means[0], log_stds[0]
        number = obs[self.config.which].flatten().long()
        rows = torch.arange(len(number), device=number.device)
        return means[number, rows], log_stds[number, rows]


def teacher_of(run: str, spec: Spec) -> Policy:
    """The frozen policy of the folder `run`, which may observe a part of `spec`. SpecMismatch if it
    observes something else; ConfigError if its actions are not normally distributed."""
    teacher = load_policy(run, spec, part=True)
    as_gaussian(teacher, run)
    return teacher.requires_grad_(False)


def as_gaussian(policy: Policy, name: str) -> HasGaussian:
    """The policy as one whose actions are normally distributed; ConfigError if they are not."""
    if not isinstance(policy, HasGaussian):
        raise ConfigError(
            f"{name} is a {type(policy).__name__}, whose actions have no normal distribution: "
            "policy=diagonal_gaussian, also inside of finetune=residual, or policy=gaussian"
        )
    return policy
