"""Stepwise progress learned from a few demonstrations, as potential-based shaping.

Robo-Dopamine (2025). A pairwise regressor (`embodied.rewards.demonstrations.pairwise_regressor`) is
fitted to hops between frames of one to five demonstrations. The progress of a state is estimated
from anchor frames a of each demonstration, whose progress phi_a is known:

    Phi(s) = w mean of compose(phi_a, h(a, s)):  phi_a = 0 (forward), 1 (backward), between
    r = r_env + scale (gamma^k Phi(s') - Phi(s)),       Phi(s') = 0 at a termination

with the confidence w = exp(-((forward - backward) / tolerance)^2). A potential does not change the
optimal policy (Ng, Harada and Russell, 1999). The model is fitted once, when the reward is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.bounds import Count, Number, Positive
from embodied.core.seeding import forked
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes
from embodied.rewards.demonstrations.observations import all_frames
from embodied.rewards.demonstrations.pairwise_regressor import (
    FitConfig,
    PairwiseRegressor,
    ends,
    fit_hops,
)
from embodied.rewards.demonstrations.progress_hops import (
    SHAPINGS,
    Frames,
    agreement,
    compose,
    integrate,
    linear_progress,
)
from embodied.rewards.fitted import FittedReward

MOST = 4096  # batch size of inference


@dataclass(frozen=True)
class Config(FitConfig):
    """Settings of stepwise progress."""

    demos: str | tuple[str, ...] | None = None  # datasets of demonstrations; must be given
    demo_episodes: Count | None = 5  # episodes of each of `demos`; null: all
    failures: str | tuple[str, ...] | None = None  # datasets of failed episodes, with progress 0
    failure_episodes: Count | None = 10  # episodes of each of `failures`; null: all
    views: tuple[str, ...] = ("state",)  # observations to use; "privileged/picture" is rendered
    shaping: Literal["potential", "gain"] = "potential"  # potential-based, or the gain in progress
    scale: Number = 1.0  # weight of the shaping
    tolerance: Positive | None = 0.5  # of forward minus backward estimate; null: confidence 1
    between: Count = 1  # anchor frames inside each demonstration
    hidden: tuple[Count, ...] = (64, 64)  # units of the hidden layers
    channels: tuple[Count, ...] = (16, 32, 32, 32)  # channels of the image encoder


class StepwiseProgress(FittedReward):
    """Progress from anchor frames, whose features the regressor compares with a state's."""

    name = "progress"
    measure = "a hop"
    known: Tensor

    def __init__(
        self, config: Config, spec: Spec, device: torch.device, seed: int, folder: Path
    ) -> None:
        super().__init__(config, seed)
        shown, failed = self.read(spec, config.failures, config.failure_episodes)
        with forked(seed):
            self.net = PairwiseRegressor(self.leaves, config.hidden, config.channels)
        self.keep(shown)
        self.fit_once(shown, failed, folder, device)

    def fit_model(self, moments: Tensors, frames: Frames, shown: int) -> float:
        return fit_hops(self.net, moments, frames, shown, self.config, self.seed)

    def components(self, transitions: Tensors) -> Tensors:
        """The environment's reward and the shaping, [N] each."""
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

    @torch.no_grad()
    def along(self, obs: Tensors, reference: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """For a trajectory (leaves [T, ...]): the integral of its hops, and progress relative to
        its own first frame and to the goal of demonstration `reference`, [T] each."""
        features = self._features({name: obs[name] for name in self.leaves})
        anchors = self._features(self.anchors()).view(-1, len(self.known), features.shape[1])
        goal = anchors[reference, -1:].expand_as(features)
        start = features[:1].expand_as(features)
        steps = self.net(features[:-1], features[1:], start[1:], goal[1:])
        forward = compose(torch.zeros(len(features)), self.net(start, features, start, goal))
        backward = compose(torch.ones(len(features)), self.net(goal, features, start, goal))
        return integrate(steps), forward, backward

    def anchors(self) -> Tensors:
        """Anchor frames [demonstrations * anchors, ...]."""
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
