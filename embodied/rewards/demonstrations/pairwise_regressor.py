"""Pairwise regressor: predicts the hop between two frames from images or vectors.

It has the role of the vision-language model in Robo-Dopamine (2025), and is small enough to be
fitted to a few demonstrations: h(before, after, start, goal) in [-1, 1], where start and goal are
the first and last frame of a demonstration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embodied.core import tensors as tt
from embodied.core.bounds import Count, CountOrZero, Fraction, NonNegative, Positive
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.nn.fit import fit
from embodied.nn.networks import mlp
from embodied.policies.networks.encoders import Encoder
from embodied.policies.networks.image_encoders import ImageConfig
from embodied.rewards.demonstrations.observations import shift_images
from embodied.rewards.demonstrations.progress_hops import Frames, pairs

ROLES = 4


class PairwiseRegressor(nn.Module):
    """Encodes every frame; an MLP maps the features of all four to a hop."""

    def __init__(
        self, leaves: Mapping[str, Leaf], hidden: tuple[int, ...], channels: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.encoder = Encoder(leaves, ImageConfig(channels, features=32), asymmetric=True)
        self.numbers = sum(leaves[name].size for name in self.encoder.vectors)
        self.head = mlp(ROLES * self.encoder.size, hidden, 1, "silu", layer_norm=True)

    def forward(self, before: Tensor, after: Tensor, start: Tensor, goal: Tensor) -> Tensor:
        """Hops [N] from features [N, F] of the four frames."""
        return torch.tanh(self.head(torch.cat([before, after, start, goal], 1))[:, 0])


@dataclass(frozen=True)
class FitConfig:
    """Settings of the fit."""

    updates: Count = 1000  # gradient steps of the fit
    batch_size: Count = 256  # pairs of frames per gradient step
    lr: Positive = 1e-3  # AdamW's initial learning rate; it falls to 0 as a cosine
    zero: Fraction = 0.05  # fraction of pairs of a frame with itself, of progress 0
    cross: Fraction = 0.5  # fraction of pairs of two episodes
    swap: Fraction = 0.75  # fraction of pairs with start and goal from another episode
    noise: NonNegative = 0.1  # noise on vectors, standard deviations
    shift: CountOrZero = 2  # largest shift of images, pixels


def fit_hops(
    net: PairwiseRegressor, moments: Tensors, frames: Frames, won: int, how: FitConfig, seed: int
) -> float:
    """Fit `net` to the hops between frames `moments` (leaves [N, ...]). The first `won` episodes of
    `frames` are demonstrations, which provide start and goal. Returns the mean squared error."""
    random = torch.Generator().manual_seed(seed)
    net.encoder.fit(tt.nest(moments, "obs"))
    first, last = ends(frames, won)

    def loss() -> Tensor:
        drawn = pairs(frames, how.batch_size, how.zero, how.cross, random)
        # The demonstration that gives start and goal of each pair: its own, or with probability
        # `swap` (and for failed episodes) any.
        episode = frames.episode[drawn.after]
        other = torch.randint(won, episode.shape, generator=random)
        leave = (torch.rand(episode.shape, generator=random) < how.swap) | (episode >= won)
        reference = torch.where(leave, other, episode)
        roles = torch.stack([drawn.before, drawn.after, first[reference], last[reference]])
        which, at = torch.unique(roles, return_inverse=True)
        features = net.encoder(shift_images(tt.take(moments, which), how.shift, random))
        given = features[at]
        noise = torch.zeros_like(given)  # on the normalised vectors, which come first
        shape = (*given.shape[:2], net.numbers)
        noise[..., : net.numbers] = how.noise * torch.randn(*shape, generator=random)
        return (net(*(given + noise)) - drawn.label).square().mean()

    return fit(net.parameters(), loss, how.updates, how.lr, decreasing=True)


def ends(frames: Frames, won: int) -> tuple[Tensor, Tensor]:
    """Indices of the first and the last frame of each demonstration, [won] each."""
    length = torch.bincount(frames.episode)[:won]
    first = length.cumsum(0) - length
    return first, first + length - 1
