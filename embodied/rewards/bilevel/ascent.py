"""Policy gradients of recorded rollouts, differentiable in their rewards: the inner problem of
rewards that are learned on two levels."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, each, under
from embodied.policies.abilities import HasLogProb


def require_log_prob(policy: Policy, reward: str) -> HasLogProb:
    """The policy; ConfigError unless it has log-probabilities of single steps."""
    if not isinstance(policy, HasLogProb) or policy.chunk != 1:
        raise ConfigError(
            f"reward={reward} follows the policy's log-probabilities of single steps: "
            "policy=diagonal_gaussian, gaussian or categorical, with policy.chunk=1"
        )
    return policy


def returns(reward: Tensor, discount: Tensor, ended: Tensor) -> Tensor:
    """Discounted sums [T, B] of the rewards of the rest of the episode, as far as the rollout has
    it. Differentiable in rewards and discounts [T, B]; `ended` (bool): with this step."""
    carried = torch.where(ended, 0.0, discount)
    sums: list[Tensor] = []
    following = torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        following = reward[t] + carried[t] * following
        sums.append(following)
    return torch.stack(sums[::-1])


def log_probs(policy: HasLogProb, rollout: Tensors) -> Tensor:
    """Log-probabilities [T, B] of a rollout's actions, differentiable in the policy."""
    flat = each(rollout, lambda leaf: leaf.flatten(0, 1))
    chances = policy.log_prob(under(flat, "obs"), flat["action"])
    return chances.view(rollout["reward"].shape)


def objective(policy: HasLogProb, rollout: Tensors, gain: Tensor) -> Tensor:
    """mean(log pi(a|s) gain) over the valid steps [T, B] of a rollout: a scalar whose gradient is
    the policy gradient."""
    valid = rollout["valid"]
    return (log_probs(policy, rollout) * gain * valid).sum() / valid.sum().clamp(min=1)


def centred(gain: Tensor, valid: Tensor) -> Tensor:
    """`gain` less its mean over the valid steps."""
    return gain - (gain * valid).sum() / valid.sum().clamp(min=1)
