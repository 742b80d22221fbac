"""RECAP: advantage-conditioned imitation of recordings of any quality (pi*0.6).

Physical Intelligence, "pi*0.6: a VLA that learns from experience", 2025. A distributional value
function is trained on the returns R_t of the episodes, by cross entropy with the return between its
two nearest atoms. A chunk is labelled by its advantage, N steps ahead,

    A_t = sum_{i<N} gamma^i r_{t+i} + gamma^N V(o_{t+N}) - V(o_t),   c_t = POSITIVE if A_t > e

where e is the quantile of A above which a share `positive` of the data lies. Corrections (a
person's steps in an episode in which a policy acted too) are POSITIVE whatever their advantage. The
policy imitates all chunks, each with its label, and acts as the POSITIVE ones (`policy=
advantage_conditioned`). To iterate: let it act, add the episodes to the data, train again.

Differences from the paper: returns are those of the run's reward and discount (a sparse success and
gamma < 1), not minus the number of steps to success with a penalty for failure; the value learns
beside the policy, in its first `value_updates` updates, not before it; e is a moving average, one
for all tasks; and an episode's advantages come from a value function that was not trained on it
(`folds`), as one trained on few episodes knows their returns by heart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from embodied.core.bounds import Bound, Count, Fraction, Number, PositiveFraction, Units
from embodied.core.build import ConfigError
from embodied.core.policy import Policy, policies_in
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.critics import Support
from embodied.learners.imitation import behavior_cloning
from embodied.learners.imitation.behavior_cloning import BehaviorCloning, behaviour
from embodied.learners.learner import RunPlan
from embodied.nn.networks import Ensemble
from embodied.nn.optim import Adam
from embodied.policies.networks.encoders import Encoder
from embodied.policies.wrappers.advantage_conditioned import (
    LABEL,
    NEGATIVE,
    POSITIVE,
    AdvantageConditioned,
)

SLOWNESS = 0.02  # step of the moving average of the threshold


@dataclass(frozen=True)
class Config(behavior_cloning.Config):
    gamma: Fraction = 0.99  # discount per environment step
    n_step: Count = 5  # decisions that an advantage looks ahead; few leave the labels to chance
    positive: Annotated[float, Bound(above=0.0, below=1.0)] = 0.4  # share above the threshold
    value_updates: Count = 1000  # first updates, in which the value function learns too
    value_lr: PositiveFraction = 3e-4  # Adam's learning rate of the value function
    hidden: tuple[Units, ...] = (256, 256)  # units of the value function's hidden layers
    atoms: Annotated[int, Bound(2)] = 101  # of the distribution of returns
    values: tuple[Number, Number] | None = None  # lowest and highest atom (null: of the returns)
    folds: Count = 5  # value functions, each without its part of the episodes (1: one of all)


class DistributionalValue(nn.Module):
    """`folds` distributions of returns, logits [folds, N, atoms] of observations [N, ...]; uses all
    observations, as critics do."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.encoder = Encoder(spec.obs, asymmetric=True)
        size = self.encoder.size
        self.net = Ensemble(config.folds, size, config.hidden, config.atoms, layer_norm=True)

    def forward(self, obs: Tensors) -> Tensor:
        return self.net(self.encoder(obs))


class Recap(BehaviorCloning):
    """Each update is a step of behaviour cloning of labelled chunks and, among the first
    `value_updates`, one of the value function on the same transitions."""

    rows = "decisions"
    usual_policy = "advantage_conditioned"
    uses_executed_steps = True
    columns = ("returns",)
    extra_columns: tuple[str, ...] = ("correction", "episode")
    threshold: Tensor  # e, NaN before the first update

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        if not any(isinstance(part, AdvantageConditioned) for _, part in policies_in(policy)):
            raise ConfigError("learner=recap labels advantages: policy=advantage_conditioned")
        super().__init__(config, policy, run)
        self.support = Support(*(config.values or (0.0, 1.0)), config.atoms)
        self.value = DistributionalValue(config, spec)
        self.optims["value"] = Adam(self.value.parameters(), config.value_lr)
        self.register_buffer("threshold", torch.tensor(torch.nan))

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        metrics: dict[str, Tensor] = {}
        if self.done < self.config.value_updates:
            loss = self.value_loss(batch)
            self.descend("value", loss)
            metrics["value_loss"] = loss.detach()
        advantage = self.advantages(batch)
        self.follow(advantage)
        label = self.labels(advantage, batch["correction"])
        metrics |= {
            "advantage": advantage.mean(),
            "threshold": self.threshold.clone(),
            "positive": (label == POSITIVE).float().mean(),
        }
        return metrics | super().update({**behaviour(batch, self.policy), LABEL: label})

    def value_loss(self, batch: Tensors) -> Tensor:
        """Mean cross entropy, of each value function on the episodes that are not of its fold."""
        logits = self.value(under(batch, "obs"))
        returns = batch["returns"].float()
        target = self.support.project(torch.ones_like(returns)[:, None], returns[:, None])
        error = -(target * logits.log_softmax(-1)).sum(-1)
        folds = self.config.folds
        if folds == 1:
            return error.mean()
        numbers = torch.arange(folds, device=error.device)
        own = batch["episode"] % folds != numbers[:, None]
        return (error * own).sum() / own.sum().clamp(min=1)

    @torch.no_grad()
    def advantages(self, batch: Tensors) -> Tensor:
        """A [N], by the value function of each transition's fold."""
        now = self.values_of(under(batch, "obs"), batch["episode"])
        following = self.values_of(under(batch, "next_obs"), batch["episode"])
        return batch["reward"] + batch["discount"] * following - now

    def values_of(self, obs: Tensors, episode: Tensor) -> Tensor:
        """V [N] by the value functions that were not trained on `episode` [N]."""
        value = self.support.mean(self.value(obs))
        return value.gather(0, (episode % self.config.folds)[None]).squeeze(0)

    def follow(self, advantage: Tensor) -> None:
        """Move the threshold towards the quantile of a batch's advantages [N]."""
        quantile = advantage.quantile(1 - self.config.positive)
        moved = torch.lerp(self.threshold, quantile, SLOWNESS)
        self.threshold.copy_(torch.where(self.threshold.isnan(), quantile, moved))

    def labels(self, advantage: Tensor, correction: Tensor) -> Tensor:
        """Labels [N] (int64) of advantages [N]; `correction` [N] (bool)."""
        good = (advantage > self.threshold) | correction
        return torch.where(good, POSITIVE, NEGATIVE)

    def fit(self, transitions: Tensors) -> None:
        """Set the normalisers, and the atoms to the range of the returns, unless it is given."""
        if self.config.values is None:
            low, high = transitions["returns"].min().item(), transitions["returns"].max().item()
            high = high if high > low else low + 1.0
            self.support = Support(low, high, self.config.atoms)
        steps = transitions["action"].reshape(-1, self.policy.chunk, *self.policy.spec.act.shape)
        super().fit({**transitions, "action": steps})
        self.value.encoder.fit(transitions)
