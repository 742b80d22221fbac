"""Generalised advantage estimation (GAE) and PPO's clipped objective.

Generalised advantage estimation (Schulman et al., 2016) over decisions with their own discounts,
and proximal policy optimisation's loss (Schulman et al., 2017):

    delta_t = r_t + d_t V(s'_t) - V(s_t),    A_t = delta_t + lambda d_t A_{t+1}
    L = -min(rho A, clip(rho, 1 - eps, 1 + eps) A),    rho = pi(a|s) / pi_old(a|s)

d is gamma^k (k steps of a chunk), 0 after a termination. s' is the true successor, so a time
limit is bootstrapped from where it cut the episode; the sum over later decisions stops there.
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
    """Advantages [T, B], zero where not `valid`; the value's targets are advantage + value.

    All [T, B]; `ended` (bool): the episode ended with this decision, for whatever reason.
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
    """Half the squared error, elementwise; with `clip` above 0 the larger of it and the error of a
    value that is at most `clip` away from `old`."""
    error = (value - target).square()
    if clip:
        held = old + (value - old).clamp(-clip, clip)
        error = torch.maximum(error, (held - target).square())
    return 0.5 * error


def normalized(advantage: Tensor, share: Tensor) -> Tensor:
    """Zero mean and unit deviation; `share` [..] is the weight of each element, 1 in total (0: it
    does not count)."""
    centred = advantage - (advantage * share).sum()
    return centred * torch.rsqrt((centred.square() * share).sum() + 1e-16)


def variance(values: Tensor, share: Tensor) -> Tensor:
    """Of elements with weights `share`, 1 in total."""
    return ((values - (values * share).sum()).square() * share).sum()
