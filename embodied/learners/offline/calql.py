"""Cal-QL: calibrated conservative Q-learning (Nakamoto et al., 2023); offline, then online.

Based on CQL (Kumar et al., 2020) and SAC. Q-values of out-of-distribution actions are pushed down
and those of dataset actions up, but the policy's Q-values not below the dataset's returns-to-go R.
This avoids the initial drop in performance when training continues online.

    L_Q = SAC's + alpha sum_i E [ logsumexp_a~ q_i(s, a~) - Q_i(s, a) ]
    q_i(s, a~) = max(Q_i(s, a~), R) - log pi(a~)     a~ ~ pi(.|s) and pi(.|s')
               = Q_i(s, a~) + A log 2                a~ uniform in [-1, 1]^A

With the log-density of each sample, the sum is an importance-sampled estimate of log integral
exp Q. Without `calibrate` it is CQL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Count, NonNegative
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each, under
from embodied.learners.actor_critic import draw
from embodied.learners.off_policy import sac


@dataclass(frozen=True)
class Config(sac.Config):
    """Settings of Cal-QL and CQL: those of SAC and of the conservative loss."""

    entropy_in_backup: bool = False  # whether the critics' target has the entropy bonus
    conservative: NonNegative = 5.0  # weight alpha of the conservative loss
    samples: Count = 10  # actions of each of the three kinds per transition
    calibrate: bool = True  # keep the policy's values above the data's returns; false: CQL


class CalQl(sac.Sac):
    """`update` as in SAC; with `calibrate`, transitions need the column `returns`."""

    data = "offline"
    usual_policy = "gaussian"

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__(config, policy, spec)
        self.columns = ("returns",) if config.calibrate else ()

    def critic_terms(self, batch: Tensors, q: Tensor) -> Tensor:
        """The conservative loss."""
        obs = under(batch, "obs")
        actions, log_prob = self._elsewhere(obs, under(batch, "next_obs"))
        floor = batch["returns"] if self.config.calibrate else None
        values = calibrated(self.critic.each(obs, actions), log_prob, floor)
        return self.config.conservative * conservative_gap(values, q)

    @torch.no_grad()
    def _elsewhere(self, obs: Tensors, following: Tensors) -> tuple[Tensor, Tensor]:
        """Sampled actions [N, 3 K, size]: of the policy at s, of the policy at s', and uniform; and
        their log-densities [N, 3 K]."""
        k = self.config.samples
        actions: list[Tensor] = []
        log_probs: list[Tensor] = []
        for seen in (obs, following):
            many = each(seen, lambda leaf: leaf.repeat_interleave(k, 0))
            action, log_prob = draw(self.policy, many)
            actions.append(action.unflatten(0, (-1, k)))
            log_probs.append(log_prob.unflatten(0, (-1, k)))
        uniform = torch.rand_like(actions[0]).mul_(2).sub_(1)
        actions.append(uniform)
        log_probs.append(torch.full_like(log_probs[0], -math.log(2) * uniform.shape[2]))
        return torch.cat(actions, 1), torch.cat(log_probs, 1)


def calibrated(q: Tensor, log_prob: Tensor, floor: Tensor | None) -> Tensor:
    """Terms [E, N, 3 K] of the logsumexp. `q` has the same shape, the last K of uniform actions;
    `floor` [N]: lower bound of the Q-values of the other actions (None: no bound)."""
    if floor is not None:
        own = 2 * q.shape[2] // 3
        held = torch.maximum(q[:, :, :own], floor[:, None])
        q = torch.cat([held, q[:, :, own:]], 2)
    return q - log_prob


def conservative_gap(values: Tensor, q: Tensor) -> Tensor:
    """Sum over critics of mean(logsumexp values - q); `values` [E, N, M], `q` [E, N]."""
    return (values.logsumexp(2) - q).mean(1).sum()
