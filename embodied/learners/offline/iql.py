"""IQL: implicit Q-learning (Kostrikov, Nair and Levine, 2022), offline and online.

Q is never evaluated at out-of-dataset actions: V is an upper expectile of Q over dataset actions,
the target of Q uses V, and the policy is extracted by advantage-weighted regression.

    L_V  = E |tau - 1[u < 0]| u^2,   u = min_i Q'_i(s, a) - V(s)
    L_Q  = sum_i E (r + d V(s') - Q_i(s, a))^2
    L_pi = E min(exp(beta u), 100) imitation(s, a)

`imitation` is the policy's own loss, so any policy with a loss can be extracted: with
policy=gaussian policy.imitate=nll it is the paper's -log pi(a|s); deterministic and flow policies
use regression losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from embodied.core.bounds import Bound, NonNegative, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.actor_critic import ActorCritic, OffPolicyConfig
from embodied.learners.critics import CriticConfig, critic_loss, ensemble
from embodied.learners.imitation.behavior_cloning import valid_steps
from embodied.learners.learner import RunPlan, soft_update
from embodied.nn.networks import Ensemble
from embodied.nn.optim import Adam
from embodied.policies.networks.encoders import Encoder


@dataclass(frozen=True)
class ImplicitConfig(OffPolicyConfig, CriticConfig):
    beta: NonNegative = 3.0  # inverse temperature, in units of 1 / value (0: plain imitation)
    clip: Positive = 100.0  # largest weight of a transition in the policy's loss
    value_lr: PositiveFraction = 3e-4  # Adam's learning rate of the value function
    cosine: bool = True  # decay the policy's learning rate to 0 along a cosine over the run


@dataclass(frozen=True)
class Config(ImplicitConfig):
    expectile: Annotated[float, Bound(above=0.0, below=1.0)] = 0.7  # tau; 0.5: mean; to 1: maximum


class Value(nn.Module):
    """State-value function V(s) [N]; uses all observations, as critics do."""

    def __init__(self, spec: Spec, hidden: Sequence[int], layer_norm: bool) -> None:
        super().__init__()
        self.encoder = Encoder(spec.obs, asymmetric=True)
        self.net = Ensemble(1, self.encoder.size, hidden, 1, layer_norm)

    def forward(self, obs: Tensors) -> Tensor:
        return self.net(self.encoder(obs)).flatten()


class ImplicitQ(ActorCritic):
    """IQL with any `value_loss`. `update` is one step of the value function, the policy and the
    critics on the same transitions."""

    data = "offline"
    counters = ("done",)
    losses = ("_loss",)
    uses_executed_steps = True
    usual_policy = "deterministic"

    def __init__(self, config: ImplicitConfig, policy: Policy, spec: Spec, run: RunPlan) -> None:
        if not spec.act.is_continuous:
            raise ConfigError("this learner needs continuous actions: learner=ppo takes choices")
        if type(policy).loss is Policy.loss:
            raise ConfigError(
                "this learner extracts the policy by imitation: the policy needs a loss"
            )
        if config.cosine and not run.updates:
            raise ConfigError("cosine=true needs the number of updates: learner.cosine=false")
        critic = ensemble(config, spec, policy.chunk * spec.act.size)
        super().__init__(config, policy, critic, policy.parameters())
        # A policy's loss may leave out what its samples need (the deviation of a Gaussian).
        self.optims["actor"] = Adam(self.actor_params, config.actor_lr, partial=True)
        self.act = spec.act
        self.done = 0
        self.total = max(run.updates, 1)
        self.value = Value(spec, config.hidden, config.layer_norm)
        self.optims["value"] = Adam(self.value.parameters(), config.value_lr)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        if self.config.cosine:
            lr = self.config.actor_lr * falling(self.done / self.total)
            group = self.optims["actor"].param_groups[0]
            if not self.config.cuda_graph:
                group["lr"] = lr
            elif isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:  # a CUDA graph would keep the value at recording
                group["lr"] = torch.tensor(lr, device=batch["reward"].device)
        self.done += 1
        return self._step(batch)

    def _step(self, batch: Tensors) -> dict[str, Tensor]:
        losses, metrics = self._loss(batch)
        losses.sum().backward()  # their parameters are disjoint
        for adam in self.optims.values():
            adam.step()
        soft_update(self.target_params, self.critic_params, self.config.tau)
        return metrics

    def _loss(self, batch: Tensors) -> tuple[Tensor, Tensors]:
        """The losses [3] of value function, policy and critics, and metrics."""
        obs = under(batch, "obs")
        config = self.config
        with torch.no_grad():
            best = self.target(obs, batch["action"]).amin(0)
            backup = batch["reward"] + batch["discount"] * self.value(under(batch, "next_obs"))
        value = self.value(obs)
        advantage = best - value.detach()
        weight = awr_weight(advantage, config.beta, config.clip)
        q = self.critic(obs, batch["action"])
        action = batch["action"].reshape(-1, self.policy.chunk, *self.act.shape)
        valid = valid_steps(batch, self.policy.chunk)
        imitation = self.policy.loss({**batch, "action": action, "valid": valid})
        losses = torch.stack(
            [
                self.value_loss(best, value),
                (weight * imitation).mean(),
                critic_loss(q, backup) + self.critic_terms(batch, q),
            ]
        )
        value_loss, actor_loss, q_loss = losses.detach().unbind()
        metrics = {
            "value_loss": value_loss,
            "actor_loss": actor_loss,
            "critic_loss": q_loss,
            "q_mean": q.detach().mean(),
            "advantage": advantage.mean(),
            "weight": weight.mean(),
        }
        return losses, metrics

    def value_loss(self, best: Tensor, value: Tensor) -> Tensor:
        """The loss of V, a scalar, from `best` = min_i Q'_i(s, a) and `value` = V(s), both [N]."""
        raise NotImplementedError(f"{type(self).__name__} does not implement value_loss")


class Iql(ImplicitQ):
    """`ImplicitQ` with the expectile loss."""

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        super().__init__(config, policy, spec, run)

    def value_loss(self, best: Tensor, value: Tensor) -> Tensor:
        return expectile_loss(best - value, self.config.expectile)


def expectile_loss(gap: Tensor, tau: float) -> Tensor:
    """Mean of |tau - 1[gap < 0]| gap^2, `gap` [N] = Q - V; minimal where V is the tau-expectile of
    Q."""
    return (torch.where(gap < 0, 1 - tau, tau) * gap.square()).mean()


def awr_weight(advantage: Tensor, beta: float, clip: float) -> Tensor:
    """min(exp(beta A), clip), [N]; finite however large A is."""
    return (beta * advantage).clamp(max=math.log(clip)).exp()


def falling(progress: float) -> float:
    """Half-cosine decay from 1 at progress 0 to 0 at progress 1, then 0."""
    return 0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0))
