"""Stepwise progress learned from a few demonstrations, as potential-based shaping.

Robo-Dopamine (2025). A `PairwiseRegressor` is fitted to hops between frames of one to five
demonstrations. The progress of a state is estimated from anchor frames a of each demonstration,
whose progress phi_a is known:

    Phi(s) = w mean of compose(phi_a, h(a, s)):  phi_a = 0 (forward), 1 (backward), between
    r = r_env + scale (gamma^k Phi(s') - Phi(s)),       Phi(s') = 0 at a termination

with the confidence w = exp(-((forward - backward) / tolerance)^2). A potential does not change the
optimal policy (Ng, Harada and Russell, 1999). The model is fitted once, when the reward is built.

The regressor has the role of the vision-language model in Robo-Dopamine (2025), and is small enough
to be fitted to a few demonstrations: h(before, after, start, goal) in [-1, 1], where start and goal
are the first and last frame of a demonstration.

Hops: relative progress between two frames, in [-1, 1].

Progress made counts as a fraction of the progress that was missing, progress lost as a fraction of
the progress that was achieved. Robo-Dopamine (2025): from progress p to progress q, both in [0, 1],

    h = (q - p) / (1 - p)  if q >= p,  else  (q - p) / p;      p <- p + (1 - p) h, or p + p h

so that composed hops never leave [0, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from embodied.core import tensors as tt
from embodied.core.bounds import (
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Number,
    Positive,
    PositiveFraction,
    Units,
)
from embodied.core.device import forked
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes
from embodied.nn.networks import mlp
from embodied.nn.optim import fit
from embodied.policies.networks.encoders import Encoder, ImageConfig
from embodied.rewards.fitted import (
    SHAPINGS,
    FittedReward,
    Frames,
    all_frames,
    linear_progress,
    shift_images,
)

SCORE_BINS = 25
GAP_BINS = 4
OVERSAMPLE = 80


def hop(before: Tensor, after: Tensor) -> Tensor:
    """Hops [N] in [-1, 1] from progress `before` [N] to `after` [N]; 0 for no change."""
    gain = after - before
    room = torch.where(gain >= 0, 1 - before, before)
    return torch.where(gain == 0, gain, gain / torch.where(gain == 0, 1.0, room)).clamp(-1, 1)


def compose(progress: Tensor, hops: Tensor) -> Tensor:
    """Progress [N] in [0, 1] after `hops` [N] from `progress` [N]."""
    room = torch.where(hops >= 0, 1 - progress, progress)
    return (progress + room * hops).clamp(0, 1)


def agreement(forward: Tensor, backward: Tensor, tolerance: float) -> Tensor:
    """Confidence exp(-((f - b) / tolerance)^2) [N] in two estimates [N]."""
    return torch.exp(-(((forward - backward) / tolerance) ** 2))


def pairs(
    frames: Frames, n: int, zero: float, cross: float, random: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """`n` training pairs: the indices [n] of both frames, and the hop [n] between them. A fraction
    `zero` is of a frame with itself, the others are balanced over bins of the hop and of the time
    difference. A fraction `cross` of the candidates is of two episodes, the others of one."""
    nothing = round(zero * n)
    pool = OVERSAMPLE * n
    before = torch.randint(len(frames), (pool,), generator=random)
    after = torch.randint(len(frames), (pool,), generator=random)
    same = frames.episode[before] == frames.episode[after]
    wanted = torch.rand(pool, generator=random) < cross
    alone = len(torch.unique(frames.episode)) == 1
    fits = (same != wanted) | alone
    before, after = before[fits], after[fits]
    label = hop(frames.progress[before], frames.progress[after])
    gap = (frames.place[after] - frames.place[before]).abs()
    chosen = balanced(cells(label, gap), n - nothing, random)
    still = torch.randint(len(frames), (nothing,), generator=random)
    return (
        torch.cat([before[chosen], still]),
        torch.cat([after[chosen], still]),
        torch.cat([label[chosen], torch.zeros(nothing)]),
    )


def cells(label: Tensor, gap: Tensor) -> Tensor:
    """Bin [N] (int64) of each candidate: its hop in [-1, 1] and its time difference in [0, 1]."""
    score = ((label + 1) / 2 * SCORE_BINS).long().clamp(max=SCORE_BINS - 1)
    return score * GAP_BINS + (gap * GAP_BINS).long().clamp(max=GAP_BINS - 1)


def balanced(cell: Tensor, n: int, random: torch.Generator) -> Tensor:
    """Indices [n] of candidates, equally many from every non-empty bin; the bins nearest to no
    change get the remainder."""
    kinds, which, count = torch.unique(cell, return_inverse=True, return_counts=True)
    quota = torch.full_like(count, n // len(kinds))
    centre = (kinds // GAP_BINS - SCORE_BINS // 2).abs().argsort(stable=True)
    quota[centre[: n % len(kinds)]] += 1
    kind = torch.repeat_interleave(torch.arange(len(kinds)), quota)
    ordered = torch.argsort(which, stable=True)
    first = (count.cumsum(0) - count)[kind]
    within = (torch.rand(n, generator=random) * count[kind]).long()
    return ordered[first + within]


ROLES = 4

MOST = 4096  # batch size of inference


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
class Config:
    """Settings of stepwise progress."""

    updates: Count = 1000  # gradient steps of the fit
    batch_size: Count = 256  # pairs of frames per gradient step
    lr: PositiveFraction = 1e-3  # AdamW's initial learning rate; it falls to 0 as a cosine
    zero: Fraction = 0.05  # fraction of pairs of a frame with itself, of progress 0
    cross: Fraction = 0.5  # fraction of pairs of two episodes
    swap: Fraction = 0.75  # fraction of pairs with start and goal from another episode
    noise: NonNegative = 0.1  # noise on vectors, standard deviations
    shift: CountOrZero = 2  # largest shift of images, pixels
    demos: str | tuple[str, ...] | None = None  # datasets of demonstrations; must be given
    demo_episodes: Count | None = 5  # episodes of each of `demos`; null: all
    failures: str | tuple[str, ...] | None = None  # datasets of failed episodes, with progress 0
    failure_episodes: Count | None = 10  # episodes of each of `failures`; null: all
    views: tuple[str, ...] = ("state",)  # observations to use; "privileged/picture" is rendered
    shaping: Literal["potential", "gain"] = "potential"  # potential-based, or the gain in progress
    scale: Number = 1.0  # weight of the shaping
    tolerance: Positive | None = 0.5  # of forward minus backward estimate; null: confidence 1
    between: Count = 1  # anchor frames inside each demonstration
    hidden: tuple[Units, ...] = (64, 64)  # units of the hidden layers
    channels: tuple[Units, ...] = (16, 32, 32, 32)  # channels of the image encoder


def ends(frames: Frames, won: int) -> tuple[Tensor, Tensor]:
    """Indices of the first and the last frame of each demonstration, [won] each."""
    length = torch.bincount(frames.episode)[:won]
    first = length.cumsum(0) - length
    return first, first + length - 1


class StepwiseProgress(FittedReward):
    """Progress from anchor frames, whose features the regressor compares with a state's."""

    name = "progress"
    measure = "a hop"
    known: Tensor

    def __init__(
        self, config: Config, spec: Spec, device: torch.device, seed: int, folder: Path
    ) -> None:
        super().__init__(config, seed)
        self.sums_steps = config.shaping == "potential"
        shown, failed = self.read(spec, config.failures, config.failure_episodes)
        with forked(seed):
            self.net = PairwiseRegressor(self.leaves, config.hidden, config.channels)
        self.keep(shown)
        self.fit_once(shown, failed, folder, device)

    def fit_model(self, moments: Tensors, frames: Frames, shown: int) -> float:
        random = torch.Generator().manual_seed(self.seed)
        how, net = self.config, self.net
        net.encoder.fit(tt.nest(moments, "obs"))
        first, last = ends(frames, shown)

        def loss() -> Tensor:
            before, after, label = pairs(frames, how.batch_size, how.zero, how.cross, random)
            # The demonstration that gives start and goal of each pair: its own, or with probability
            # `swap` (and for failed episodes) any.
            episode = frames.episode[after]
            other = torch.randint(shown, episode.shape, generator=random)
            leave = (torch.rand(episode.shape, generator=random) < how.swap) | (episode >= shown)
            reference = torch.where(leave, other, episode)
            roles = torch.stack([before, after, first[reference], last[reference]])
            which, at = torch.unique(roles, return_inverse=True)
            features = net.encoder(shift_images(tt.take(moments, which), how.shift, random))
            given = features[at]
            noise = torch.zeros_like(given)  # on the normalised vectors, which come first
            shape = (*given.shape[:2], net.numbers)
            noise[..., : net.numbers] = how.noise * torch.randn(*shape, generator=random)
            return (net(*(given + noise)) - label).square().mean()

        return fit(net.parameters(), loss, how.updates, how.lr, decreasing=True)

    def components(self, transitions: Tensors) -> Tensors:
        before = self.potential(tt.under(transitions, "obs"))
        after = self.potential(tt.under(transitions, "next_obs"))
        shaping = SHAPINGS[self.config.shaping](before, after, transitions["discount"])
        return {"env": transitions["reward"], "progress": self.config.scale * shaping}

    def potential(self, obs: Tensors) -> Tensor:
        """Phi [N] in [0, 1] of observations (leaves [N, ...])."""
        forward, between, backward = self.readouts(obs)
        fused = torch.stack([forward, between, backward]).mean(0)
        if self.config.tolerance is None:
            return fused
        return fused * agreement(forward, backward, self.config.tolerance)

    @torch.no_grad()
    def readouts(self, obs: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Progress [N] estimated from the start of each demonstration (forward), from frames inside
        it, and from its end (backward), averaged over demonstrations."""
        features = self._features({name: obs[name] for name in self.leaves})
        anchors = self._features(self.anchors())
        per = len(self.known)  # anchors of a demonstration: start, between, goal
        count = len(anchors) // per
        own = anchors.view(count, per, -1)
        n, many = len(features), count * per
        before = anchors.repeat(n, 1)
        start = own[:, :1].expand(-1, per, -1).flatten(0, 1).repeat(n, 1)
        goal = own[:, -1:].expand(-1, per, -1).flatten(0, 1).repeat(n, 1)
        hops = self.net(before, features.repeat_interleave(many, 0), start, goal)
        read = compose(self.known.repeat(n * count), hops).view(n, count, per).mean(1)
        return read[:, 0], read[:, 1:-1].mean(1), read[:, -1]

    def anchors(self) -> Tensors:
        return {name: getattr(self, _buffer(name)) for name in self.leaves}

    def keep(self, won: Episodes) -> None:
        """Store the anchors: evenly spaced frames of each demonstration, both ends included."""
        per = self.config.between + 2
        self.register_buffer("known", torch.linspace(0, 1, per))
        seen, _ = all_frames(won, self.leaves)
        first, last = ends(linear_progress(won.length + 1), len(won))
        at = first[:, None] + (self.known * (last - first)[:, None]).round().long()
        for name, value in seen.items():
            self.register_buffer(_buffer(name), value[at.flatten()].clone())

    def _features(self, obs: Tensors) -> Tensor:
        parts = [
            self.net.encoder({k: v[i : i + MOST] for k, v in obs.items()})
            for i in range(0, tt.length(obs), MOST)
        ]
        return torch.cat(parts)


def _buffer(name: str) -> str:
    return "anchor_" + name.replace("/", "__")
