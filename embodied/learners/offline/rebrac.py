"""ReBRAC: TD3 that is held near the data; offline and online.

Tarasov, Kurenkov, Nikulin and Kolesnikov, 2023: separate penalties of actor and critic, after BRAC
(Wu et al., 2019). TD3+BC (Fujimoto and Gu, 2021) is a special case (td3_bc.yaml). With a' the
dataset's next action and a~' the target policy's noisy action:

    y    = r + d (min_i Q'_i(s', a~') - beta_c |a~' - a'|^2)
    L_Q  = sum_i E (Q_i(s, a) - y)^2
    L_mu = E beta_a |mu(s) - a|^2 - E min_i Q_i(s, mu(s)) / mean |Q|

Where the dataset has no next action (the last transition before a time limit), the critic's penalty
is omitted. With `atoms` the critics are categorical (as in FastTD3), and the penalty is taken from
the reward: bounded values of a sparse success, of which GR-RL (2025) makes progress.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied.core.bounds import NonNegative
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.off_policy import td3


@dataclass(frozen=True)
class Config(td3.Config):
    """Settings of ReBRAC and TD3+BC: those of TD3 and of the penalties."""

    layer_norm: bool = True  # layer normalisation in the critics
    actor_bc: NonNegative = 0.01  # beta_a, weight of the distance to the data's action
    critic_bc: NonNegative = 0.01  # beta_c, weight of the distance to the data's next action
    distance: Literal["sum", "mean"] = "sum"  # of the squares over the action's elements
    value: Literal["min", "first"] = "min"  # of the critics; the policy maximises it


class Rebrac(td3.Td3):
    """`update` as in TD3; with `critic_bc` > 0, transitions need the column `next_action`."""

    data = "offline"
    usual_policy = "deterministic"

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__(config, policy, spec)
        self.columns = ("next_action",) if config.critic_bc else ()

    def _critic_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        q = self.critic(under(batch, "obs"), batch["action"])
        with torch.no_grad():
            following = under(batch, "next_obs")
            action = self.target_policy(following)
            action = self.target_noise(action).add_(action).clamp_(-1, 1)
            reward, discount = batch["reward"], batch["discount"]
            penalty: Tensor | float = 0.0
            if self.config.critic_bc:
                # Unknown next actions are NaN: no penalty there.
                apart = self._distance(action, batch["next_action"]).nan_to_num(0.0)
                penalty = self.config.critic_bc * apart
            value = self.target(following, action)
            if self.support is None:
                backup = torch.addcmul(reward, discount, value.amin(0) - penalty)
            else:
                lowest = self.support.lowest(value)
                backup = self.support.back_up(lowest, reward - discount * penalty, discount)
        return self.critic_error(batch, q, backup)

    def _actor_loss(self, batch: Tensors) -> Tensor:
        obs = under(batch, "obs")
        action = self.policy(obs)
        q = self.critic(obs, action, 1 if self.config.value == "first" else None)
        return behaved_loss(
            self.values(q).amin(0) + self.prior(obs, action), self.actor_penalty(batch, action)
        )

    def actor_penalty(self, batch: Tensors, action: Tensor) -> Tensor:
        """What holds the policy's `action` [N, size] near the data, a scalar: beta_a times the mean
        distance to the data's actions. Subclasses may measure it otherwise."""
        return self.config.actor_bc * self._distance(action, batch["action"]).mean()

    def _distance(self, one: Tensor, other: Tensor) -> Tensor:
        apart = (one - other).square()
        return apart.sum(1) if self.config.distance == "sum" else apart.mean(1)


def behaved_loss(q: Tensor, penalty: Tensor) -> Tensor:
    """penalty - mean(q / mean |q|), `q` [N]; the division makes the penalty's weight independent of
    the reward scale."""
    return penalty - q.mean() / q.detach().abs().mean()
