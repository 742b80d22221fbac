"""Parts of PPO: advantages and the clipped objective, learning rates, running statistics.

GAE (Schulman et al., 2016) over decisions with individual discounts, and the loss of PPO (Schulman
et al., 2017):

    delta_t = r_t + d_t V(s'_t) - V(s_t),    A_t = delta_t + lambda d_t A_{t+1}
    L = -min(rho A, clip(rho, 1 - eps, 1 + eps) A),    rho = pi(a|s) / pi_old(a|s)

d is gamma^k (k steps of a chunk), 0 after a termination. s' is the true next observation, so a
truncated episode is bootstrapped from its last observation; the sum over later decisions ends
there. Learning rates are tensors, so that an update recorded as a CUDA graph can change them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from embodied.core import distributed
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.nn.normalizers import merge_moments
from embodied.nn.optim import Adam
from embodied.policies.networks.encoders import Encoder


def gae(
    reward: Tensor,
    discount: Tensor,
    ended: Tensor,
    valid: Tensor,
    value: Tensor,
    next_value: Tensor,
    lam: float,
) -> Tensor:
    """Advantages [T, B], zero where not `valid`; value targets are advantage + value. All arguments
    are [T, B]; `ended` (bool): the episode ended with this decision (terminated or truncated)."""
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


def value_loss(value: Tensor, target: Tensor) -> Tensor:
    """Half the squared error, elementwise."""
    return 0.5 * (value - target).square()


def normalized(advantage: Tensor, share: Tensor) -> Tensor:
    """Advantages with zero mean and unit standard deviation; `share`: weight of each element, with
    sum 1 (0: ignored)."""
    centred = advantage - (advantage * share).sum()
    return centred * torch.rsqrt((centred.square() * share).sum() + 1e-16)


def variance(values: Tensor, share: Tensor) -> Tensor:
    """Weighted variance; the weights `share` sum to 1."""
    return ((values - (values * share).sum()).square() * share).sum()


Schedule = Literal["constant", "linear", "cosine", "adaptive"]


class LearningRates(nn.Module):
    """The learning rates of several optimisers: `base_lrs` times a common factor `lr_scale`.
    `active` [optimisers]: 1, or 0 for a rate of 0. While the first one is 0 (a policy that waits
    for its critic), its KL divergence says nothing and `adapt` changes nothing."""

    base_lrs: Tensor
    lr_scale: Tensor
    active: Tensor

    def __init__(self, base_lrs: Sequence[float], kind: Schedule) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("base_lrs", torch.tensor(base_lrs))
        self.register_buffer("lr_scale", torch.tensor(1.0))
        self.register_buffer("active", torch.ones(len(base_lrs)), persistent=False)

    def schedule(self, progress: float) -> None:
        """Set the factor for `progress`, the completed share of the run."""
        left = 1 - min(progress, 1.0)
        if self.kind == "linear":
            self.lr_scale.fill_(left)
        elif self.kind == "cosine":
            self.lr_scale.fill_(0.5 - 0.5 * math.cos(math.pi * left))

    def adapt(self, kl: Tensor, target: float) -> None:
        """Multiply the rates by 1.5 if the KL divergence of an update is below half the target,
        divide them by 1.5 if it is above twice the target (Rudin et al., 2022)."""
        scale = self.lr_scale
        lower = torch.where(kl > 2 * target, scale / 1.5, scale)
        found = torch.where(kl < target / 2, scale * 1.5, lower)
        found = (found * self.base_lrs[0]).clamp(1e-5, 1e-2) / self.base_lrs[0]
        scale.copy_(torch.where(self.active[0] > 0, found, scale))

    def write(self, optims: Iterable[Adam]) -> None:
        """Write the rates into the optimisers, in their order."""
        for adam, rate, active in zip(optims, self.base_lrs, self.active, strict=False):
            group = adam.param_groups[0]
            if not isinstance(group["lr"], Tensor) or group["lr"].device != rate.device:
                group["lr"] = torch.empty_like(rate)
            torch.mul(self.lr_scale, rate, out=group["lr"]).mul_(active)


def clip_norm(grads: list[Tensor], most: float) -> Tensor:
    """Clip gradients in place to the total norm `most`; returns the norm before clipping. Never
    synchronises with the device."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_mul_(grads, (most / (norm + 1e-6)).clamp(max=1))  # pyright: ignore[reportPrivateImportUsage]
    return norm


GIVEN = 10_000  # weight, in samples, of a normaliser that was set before training


class Moments(nn.Module):
    """Running mean and population variance [size]; never synchronises with the device."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        # float64: in float32 the sample count would stop growing at 16 million.
        for name, shape in (("count", ()), ("mean", (size,)), ("squares", (size,))):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))

    def add(self, values: Tensor, valid: Tensor) -> None:
        """Merge the samples of `values` [N, size] where `valid` [N] (bool) is true."""
        weight = valid.double()[:, None]
        values = values.double()
        new = weight.sum()
        sums = (values * weight).sum(0)
        distributed.add_up([new, sums])
        mean = sums / new.clamp(min=1)
        squares = ((values - mean).square() * weight).sum(0)
        distributed.add_up([squares])
        merge_moments(self, new, mean, squares)

    @property
    def variance(self) -> Tensor:
        return self.squares / self.count.clamp(min=1)


class ObservationStats(Moments):
    """Running statistics for an encoder's observation normaliser (None: the policy has its own
    kind); `given`: the normaliser was already set, for example by a base policy."""

    def __init__(self, encoder: Encoder | None) -> None:
        super().__init__(0 if encoder is None else len(encoder.norm.mean))
        self.given = encoder is not None and bool(encoder.norm.limit.isfinite())
        if encoder is not None and self.given:
            norm = encoder.norm
            self.count.fill_(GIVEN)
            self.mean.copy_(norm.mean)
            self.squares.copy_(norm.std.double().square() * GIVEN)

    @torch.no_grad()
    def follow(self, encoder: Encoder, obs: Tensors, valid: Tensor) -> None:
        """Merge `obs` [N, ...] where `valid` [N] and set the encoder's normaliser."""
        if not encoder.vectors:
            return
        self.add(encoder.flat(obs), valid)
        norm = encoder.norm
        std = self.variance.sqrt().float()
        norm.mean.copy_(self.mean)
        norm.std.copy_(torch.where(std < 1e-4, torch.ones_like(std), std))
        norm.limit.fill_(norm.clip)


class RewardScaler(Moments):
    """Divides rewards by the running std of the discounted return (Engstrom et al., 2020)."""

    def __init__(self, clip: float) -> None:
        super().__init__(1)
        self.clip = clip
        self.running = torch.empty(0)  # [B], discounted return of each running episode

    @torch.no_grad()
    def scale(self, reward: Tensor, discount: Tensor, ended: Tensor, valid: Tensor) -> Tensor:
        """Merge the discounted returns up to each reward, then return scaled rewards [T, B]; all
        arguments are [T, B]."""
        if len(self.running) != reward.shape[1]:
            self.running = torch.zeros_like(reward[0])
        passes = torch.where(valid, discount * ~ended, 1.0)
        returns = torch.empty_like(reward)
        now = self.running
        for t in range(len(reward)):
            torch.add(now, reward[t] * valid[t], out=returns[t])
            now = returns[t] * passes[t]
        self.running = now
        self.add(returns.view(-1, 1), valid.flatten())
        return self.scaled(reward)

    def scaled(self, reward: Tensor) -> Tensor:
        """Rewards [...] divided by the deviation so far."""
        deviation = (self.variance + 1e-8).sqrt().to(reward.dtype)
        return (reward / deviation).clamp(-self.clip, self.clip)


@runtime_checkable
class StochasticPolicy(Protocol):
    """A policy with log-probabilities."""

    def evaluate_actions(self, obs: Tensors, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, [n] each, of stored actions."""
        ...


@runtime_checkable
class HasDivergence(Protocol):
    """A policy whose divergence from another one of its class is known in closed form."""

    def kl(self, obs: Tensors, other: Any) -> Tensor:
        """KL(self || other) at each observation, [n], in nats."""
        ...


def require_divergence(policy: Policy) -> None:
    """ConfigError for a policy whose divergence from another one is not known."""
    if not isinstance(policy, HasDivergence) or not isinstance(policy, StochasticPolicy):
        raise ConfigError(
            "this learner needs a policy whose KL divergence is known in closed form: "
            "policy=diagonal_gaussian or policy=categorical"
        )


@runtime_checkable
class RecurrentPolicy(Protocol):
    """A policy with a recurrent state of `width` numbers."""

    width: int

    def evaluate_sequence(
        self, obs: Tensors, action: Tensor, carry: Tensors, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, [T, B] each, of sequences of stored actions."""
        ...
