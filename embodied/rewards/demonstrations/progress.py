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

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from embodied.core import tensors as tt
from embodied.core.bounds import Count, CountOrZero, Fraction, NonNegative, Number, Positive
from embodied.core.build import ConfigError
from embodied.core.env import VecEnv
from embodied.core.reward import Reward
from embodied.core.seeding import forked
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import joined
from embodied.rewards.demonstrations.fitted_once import fitted_once
from embodied.rewards.demonstrations.observations import (
    all_frames,
    read_demonstrations,
    require_observed,
    shared_leaves,
)
from embodied.rewards.demonstrations.pairwise_regressor import (
    FitConfig,
    PairwiseRegressor,
    ends,
    fit,
)
from embodied.rewards.demonstrations.progress_hops import (
    SHAPINGS,
    Frames,
    agreement,
    compose,
    integrate,
    linear_progress,
)
from embodied.rewards.wrappers.render_caption import PICTURE, with_render

MOST = 4096  # batch size of inference


@dataclass(frozen=True)
class Config:
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
    updates: Count = 1000  # gradient steps of the fit
    batch_size: Count = 256  # pairs of frames per gradient step
    lr: Positive = 1e-3  # AdamW's initial learning rate; it falls to 0 as a cosine
    zero: Fraction = 0.05  # fraction of pairs of a frame with itself, of progress 0
    cross: Fraction = 0.5  # fraction of pairs of two episodes
    swap: Fraction = 0.75  # fraction of pairs with start and goal from another episode
    noise: NonNegative = 0.1  # noise on vectors, standard deviations
    shift: CountOrZero = 2  # largest shift of images, pixels

    def __post_init__(self) -> None:
        for name in ("updates", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"reward.{name}={getattr(self, name)} must be at least 1")


class StepwiseProgress(nn.Module, Reward):
    """The fitted model is stored in the run's `folder`; built again with the same settings and
    demonstrations, it is loaded instead of fitted."""

    frozen = True
    known: Tensor

    def __init__(
        self, config: Config, spec: Spec, device: torch.device, seed: int, folder: Path
    ) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        shown, missed = read_demonstrations(
            config.demos, config.demo_episodes, config.failures, config.failure_episodes
        )
        self.leaves = shared_leaves(config.views, [part.spec for part in shown + missed])
        require_observed(self.leaves, spec)
        won, lost = joined(shown), joined(missed) if missed else None
        self.net = PairwiseRegressor(self.leaves, config.hidden, config.channels)
        self.keep(won)
        mark = self._fingerprint(won, lost)
        fitted_once(self, folder, "progress", mark, lambda: self._fit(won, lost))
        self.to(device).eval().requires_grad_(False)

    def augment_env(self, env: VecEnv) -> VecEnv:
        """The environment with rendered images, if they are needed and not observed."""
        if PICTURE not in self.leaves or PICTURE in env.spec.obs:
            return env
        return with_render(env, self.leaves[PICTURE].shape[0])

    def __call__(self, rows: Tensors) -> Tensor:
        """The environment's reward plus the shaping, [N]."""
        terms = self.components(rows)
        return terms["env"] + terms["progress"]

    def components(self, rows: Tensors) -> Tensors:
        """Both terms, [N] each."""
        before = self.potential(tt.under(rows, "obs"))
        after = self.potential(tt.under(rows, "next_obs"))
        shaping = SHAPINGS[self.config.shaping](before, after, rows["discount"])
        return {"env": rows["reward"], "progress": self.config.scale * shaping}

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """Fitted once; nothing to learn."""
        return {}

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
        seen, frames = _moments(won, self.leaves, succeeds=True)
        first, last = ends(frames, len(won))
        at = first[:, None] + (self.known * (last - first)[:, None]).round().long()
        for name, value in seen.items():
            self.register_buffer(_buffer(name), value[at.flatten()].clone())

    def get_state(self) -> dict[str, Any]:
        return {"module": self.state_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state["module"])

    def _features(self, obs: Tensors) -> Tensor:
        parts = [
            self.net.encoder({k: v[i : i + MOST] for k, v in obs.items()})
            for i in range(0, tt.length(obs), MOST)
        ]
        return torch.cat(parts)

    def _fit(self, won: Episodes, lost: Episodes | None) -> dict[str, Any]:
        seen, frames = _moments(won, self.leaves, succeeds=True)
        if lost is not None:
            more, after = _moments(lost, self.leaves, succeeds=False)
            seen = tt.cat([seen, more])
            frames = frames.followed_by(after)
        settings = {f: getattr(self.config, f) for f in FitConfig.__dataclass_fields__}
        with forked(self.seed):
            self.net = PairwiseRegressor(self.leaves, self.config.hidden, self.config.channels)
        error = fit(self.net, seen, frames, len(won), FitConfig(**settings), self.seed)
        print(
            f"progress: fitted to {len(won)} demonstrations, RMSE of a hop {math.sqrt(error):.3f}"
        )
        return {
            "demonstrations": len(won),
            "failures": 0 if lost is None else len(lost),
            "moments": int(won.length.sum()) + len(won),
            "error": error,
            "config": asdict(self.config),
        }

    def _fingerprint(self, won: Episodes, lost: Episodes | None) -> str:
        """Hash of everything that the fit depends on."""
        digest = hashlib.sha256(json.dumps([asdict(self.config), self.seed]).encode())
        for episodes in (won, *([] if lost is None else [lost])):
            for value in _moments(episodes, self.leaves, succeeds=True)[0].values():
                digest.update(value.contiguous().numpy().tobytes())
        return digest.hexdigest()


def _buffer(name: str) -> str:
    return "anchor_" + name.replace("/", "__")


def _moments(episodes: Episodes, leaves: dict[str, Leaf], succeeds: bool) -> tuple[Tensors, Frames]:
    """Every observation of every episode, the final one included."""
    seen, _ = all_frames(episodes, leaves)
    return seen, linear_progress(episodes.length + 1, succeeds)
