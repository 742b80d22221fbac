"""EXPO: fine-tune an expressive policy without differentiating through it (Dong et al., 2025).

The base (a flow policy) is trained by imitation of all stored actions; a small edit policy
maximises Q. The agent acts, and the target is computed, with the best of N base samples and their
N edited versions:

    a*  = argmax min_{M} Q'(s', .) over {a_i, clip(a_i + scale u_i)},   a_i ~ base, u_i ~ edit
    y   = r + d min_{M'} Q'(s', a*),           M, M' independent random subsets of the E critics
    L_Q = sum_i E (Q_i(s, a) - y)^2,           L_base = imitation of a
    L_e = E (alpha log pi_e(scale u | s, a) - mean_i Q_i(s, clip(a + scale u))),   a: stored action
    L_alpha = -alpha E (log pi_e + D (h + log scale))

The density is that of the scaled edit, log p(u) - D log scale, and the target entropy is scaled
accordingly; otherwise the temperature diverges. Acting uses an EMA of the base. Differences from
the published code: the action is always the argmax (they can sample it by softmax), and the base's
network is a residual MLP of this package; of chunks, the base imitates the executed steps.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Count, Number, Positive, PositiveFraction
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, under
from embodied.learners.actor_critic import (
    ActorCritic,
    OffPolicyConfig,
    TemperatureConfig,
    actor_loss,
)
from embodied.learners.imitation.behavior_cloning import behaviour
from embodied.learners.learner import soft_update
from embodied.nn.optim import Adam
from embodied.policies.wrappers.best_of_n import select_by_q
from embodied.policies.wrappers.edit import Edit


@dataclass(frozen=True)
class Config(OffPolicyConfig, TemperatureConfig):
    """Settings of EXPO. The numbers of critics and candidates are settings of the policy."""

    utd: Count = 1  # critic steps per update, each on its own `batch_size` transitions
    subset: Count = 2  # of the policy's critics, drawn at random for each minimum
    base_tau: PositiveFraction = 0.001  # step of the acting base towards the trained one
    base_lr: PositiveFraction = 3e-4  # Adam's learning rate of the base policy
    actor_lr: PositiveFraction = 3e-4  # Adam's learning rate of the edit policy
    initial_temperature: Positive = 0.01  # alpha at the start, in units of the reward
    target_entropy: Number = -0.5  # of an edit in units of its scale, per action element


class Expo(ActorCritic):
    """`update` takes utd * batch_size transitions: utd critic steps on slices, then one step of
    base, edit policy and temperature on the last slice. `online` is trained; `policy`, which acts,
    shares its edit policy and critics, and its base is an EMA of the trained one."""

    data = "off_policy"
    uses_executed_steps = True
    policy: Edit  # pyright: ignore[reportIncompatibleVariableOverride]
    online: Edit

    def __init__(self, config: Config, policy: Policy) -> None:
        if not isinstance(policy, Edit):
            raise ConfigError("learner=expo needs policy=edit (or finetune=expo)")
        critics = policy.critic.ensemble.n
        if not 1 <= config.subset <= critics:
            raise ConfigError(f"subset={config.subset} is not in 1..{critics} (critics)")
        acting = twin(policy.requires_grad_(True))
        entropy = (config.target_entropy + math.log(policy.scale)) * policy.size
        super().__init__(config, acting, policy.critic, policy.edit.parameters(), entropy)
        self.batch_size = config.utd * config.batch_size
        self.online = policy
        self.base_params: list[Tensor] = list(policy.base.parameters())
        self.ema_base_params: list[Tensor] = list(self.policy.base.parameters())
        self.optims["base"] = Adam(self.base_params, config.base_lr)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        metrics: Tensors = {}
        for part in self.slices(batch, self.config.batch_size):
            metrics |= self.critic_step(part, self.config.tau)
        return metrics | self._base_step(part) | self.soft_actor_step(part)

    @torch.no_grad()
    def _backup(self, reward: Tensor, discount: Tensor, following: Tensors) -> Tensor:
        """The target y [N]: the trained base proposes, one random subset of the target critics
        selects the action, another one evaluates it."""
        proposals = self.online.proposals(
            following, self.online.sample_noise(reward.shape[0], True)
        )
        action, _ = select_by_q(self._least, following, proposals)
        return torch.addcmul(reward, discount, self._least(following, action[:, None])[:, 0])

    def _least(self, obs: Tensors, actions: Tensor) -> Tensor:
        """Minimum [N, K] over `subset` randomly chosen target critics."""
        # Not randperm: it synchronises, and a CUDA graph would replay a single sample.
        scores = torch.rand(self.target.ensemble.n, device=actions.device)
        return self.target.each(obs, actions, scores.topk(self.config.subset).indices).amin(0)

    def _base_step(self, batch: Tensors) -> dict[str, Tensor]:
        loss = self.online.base.loss(behaviour(batch, self.online)).mean()
        self.descend("base", loss)
        soft_update(self.ema_base_params, self.base_params, self.config.base_tau)
        return {"base_loss": loss.detach()}

    def _actor_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        obs = under(batch, "obs")
        action = batch["action"]
        edited, log_prob = self.online.revise(obs, action, torch.randn_like(action))
        return actor_loss(self.critic(obs, edited).mean(0), log_prob, self.alpha), log_prob.detach()

    def fit(self, transitions: Tensors) -> None:
        for part in (self.online, self.policy, self.target.encoder):
            part.fit(transitions)


def twin(policy: Edit) -> Edit:
    """A policy with the same edit policy and critics and a frozen copy of the base."""
    other = build(policy.node, Edit, spec=policy.spec)
    other.edit = policy.edit
    other.critic = policy.critic
    other.fresh = policy.fresh
    other.base = copy.deepcopy(policy.base).requires_grad_(False)
    return other
