"""Running statistics of PPO: observation normalisation and reward scaling.

Mean and squared deviations of all batches so far are merged exactly (Chan et al., 1983):

    n = n_a + n_b,  d = m_b - m_a,  m = m_a + d n_b / n,  S = S_a + S_b + d^2 n_a n_b / n

Processes that learn together take up the batches of all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodied.core import distributed
from embodied.core.tensors import Tensors
from embodied.moved import attributes
from policies.networks.encoders import Encoder

GIVEN = 10_000  # rows that a normaliser counts as that was set from data before


class Moments(nn.Module):
    """Mean and population variance [size] of all rows seen so far; nothing waits for the device."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        # Sums over a billion rows: single precision would stop counting at 16 million.
        for name, shape in (("count", ()), ("mean", (size,)), ("squares", (size,))):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))

    def add(self, values: Tensor, valid: Tensor) -> None:
        """Merge rows `valid` [N] (bool) of `values` [N, size]."""
        weight = valid.double()[:, None]
        values = values.double()
        new, sums = weight.sum(), (values * weight).sum(0)
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
    """The normaliser of an encoder's vectors, over everything seen so far; `given`: it was set
    before."""

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
        """Merge rows `valid` [N] of `obs` [N, ...] and set the encoder's normaliser."""
        if not encoder.vectors:
            return
        self.add(encoder.flat(obs), valid)
        norm, std = encoder.norm, self.variance.sqrt().float()
        norm.mean.copy_(self.mean)
        norm.std.copy_(torch.where(std < 1e-4, torch.ones_like(std), std))
        norm.limit.fill_(norm.clip)


class RewardScaler(Moments):
    """Rewards divided by the deviation of the running discounted return (Engstrom et al., 2020)."""

    def __init__(self, clip: float) -> None:
        super().__init__(1)
        self.clip = clip
        self.running = torch.empty(0)  # [B], of the episodes in progress

    @torch.no_grad()
    def scale(self, reward: Tensor, discount: Tensor, ended: Tensor, valid: Tensor) -> Tensor:
        """Scaled rewards [T, B], after merging the returns that end in them; all [T, B]."""
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


__getattr__ = attributes(__name__)
