"""Running statistics of PPO: observation normalisation and reward scaling.

Means and sums of squared deviations of batches are merged exactly (Chan et al., 1983):

    n = n_a + n_b,  d = m_b - m_a,  m = m_a + d n_b / n,  S = S_a + S_b + d^2 n_a n_b / n

In data-parallel training every process merges the batches of all processes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodied.core import distributed
from embodied.core.tensors import Tensors
from embodied.policies.networks.encoders import Encoder

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
        total = (self.count + new).clamp(min=1)
        apart = mean - self.mean
        self.squares += squares + apart.square() * self.count * new / total
        self.mean += apart * new / total
        self.count += new

    @property
    def variance(self) -> Tensor:
        return self.squares / self.count.clamp(min=1)


class ObservationStats(Moments):
    """Running statistics for an encoder's observation normaliser; `given`: the normaliser was
    already set, for example by a base policy."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(len(encoder.norm.mean))
        norm = encoder.norm
        self.given = bool(norm.limit.isfinite())
        if self.given:
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
        deviation = (self.variance + 1e-8).sqrt().to(reward.dtype)
        return (reward / deviation).clamp(-self.clip, self.clip)
