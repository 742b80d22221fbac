"""Generalised advantage estimation (GAE) and PPO's clipped objective.

GAE (Schulman et al., 2016) over decisions with individual discounts, and the loss of PPO (Schulman
et al., 2017):

    delta_t = r_t + d_t V(s'_t) - V(s_t),    A_t = delta_t + lambda d_t A_{t+1}
    L = -min(rho A, clip(rho, 1 - eps, 1 + eps) A),    rho = pi(a|s) / pi_old(a|s)

d is gamma^k (k steps of a chunk), 0 after a termination. s' is the true next observation, so a
truncated episode is bootstrapped from its last observation; the sum over later decisions ends
there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    reward: Tensor,
    discount: Tensor,
    ended: Tensor,
    valid: Tensor,
    value: Tensor,
    next_value: Tensor,
    lam: float,
) -> Tensor:
    """Advantages [T, B], zero where not `valid`; value targets are advantage + value.

    All arguments are [T, B]; `ended` (bool): the episode ended with this decision (terminated or
    truncated).
    """
    delta = (reward + discount * next_value - value) * valid
    trace = lam * discount * (valid & ~ended)
    advantage = torch.empty_like(delta)
    following = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        following = torch.addcmul(delta[t], trace[t], following, out=advantage[t])
    return advantage


def clip_loss(
    log_prob: Tensor, old: Tensor, advantage: Tensor, clip: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The clipped objective and the log ratio, elementwise over tensors of one shape."""
    log_ratio = log_prob - old
    ratio = log_ratio.exp()
    held = torch.minimum(torch.as_tensor(1 + clip), torch.maximum(torch.as_tensor(1 - clip), ratio))
    return -torch.minimum(ratio * advantage, held * advantage), log_ratio


def value_loss(value: Tensor, old: Tensor, target: Tensor, clip: float) -> Tensor:
    """Half the squared error, elementwise; with `clip` > 0 the maximum of it and the error of the
    value clipped to `old` +- `clip`."""
    error = (value - target).square()
    if clip:
        held = old + (value - old).clamp(-clip, clip)
        error = torch.maximum(error, (held - target).square())
    return 0.5 * error


def normalized(advantage: Tensor, share: Tensor) -> Tensor:
    """Advantages with zero mean and unit standard deviation; `share`: weight of each element, with
    sum 1 (0: ignored)."""
    centred = advantage - (advantage * share).sum()
    return centred * torch.rsqrt((centred.square() * share).sum() + 1e-16)


def variance(values: Tensor, share: Tensor) -> Tensor:
    """Weighted variance; the weights `share` sum to 1."""
    return ((values - (values * share).sum()).square() * share).sum()
