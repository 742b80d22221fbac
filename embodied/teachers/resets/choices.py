"""Teachers that choose initial states along trajectories: SnapshotRL, Reverse, Trajectory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core import tensors as tt
from embodied.core.bounds import Count, CountOrZero, Fraction, NonNegative, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.env import VecEnv
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.teachers.resets import reset_distribution
from embodied.teachers.resets.reset_distribution import (
    DEFAULT_RESET,
    ResetDistribution,
    Trajectories,
    restored,
    with_obs,
)
from embodied.teachers.teacher import Floats

PASSES = 50


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig(reset_distribution.Config):
    """Settings of SnapshotRL."""

    best: Count = 10  # recorded episodes that are kept
    clusters: Count = 6  # clusters of their states, sampled uniformly
    steps: CountOrZero = 100_000  # environment steps with saved states; 0: always
    limit: CountOrZero = 100  # steps of episodes from a saved state; 0: the environment's limit


class Snapshot(ResetDistribution):
    """SnapshotRL (S3RL; Zhao et al., 2024): initial states from a trained policy's best episodes.

    The `best` of `episodes` recorded episodes are kept, and their states are grouped into
    `clusters` by k-means. For the first `steps` steps of training an episode starts from a
    uniformly sampled state of a uniformly sampled cluster and is truncated after `limit` steps. The
    paper clusters by the player's Q(s, pi(s)); here the feature is the discounted return that
    followed, a Monte Carlo estimate of it.
    """

    remembered = ("members",)

    def __init__(self, config: SnapshotConfig, spec: Spec, env: VecEnv, seed: int = 0) -> None:
        super().__init__(config, spec, env, seed)

    def select(self, paths: Trajectories) -> Trajectories:
        best = paths.returns.argsort(descending=True)[: self.config.best]
        return paths.only(best.sort().values)

    def set_up(self) -> None:
        followed = self.paths.togo.double().numpy()[:, None]
        label = k_means(followed, self.config.clusters, self.random)
        self.members = [np.flatnonzero(label == each) for each in np.unique(label)]

    def propose(self, n: int) -> list[tuple[int, Any]]:
        chosen = self.random.integers(len(self.members), size=n)
        return [(int(self.random.choice(self.members[each])), None) for each in chosen]

    def learn(self, states: list[int], scores: Floats, memos: list[Any]) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {"states": float(len(self.paths)), "clusters": float(len(self.members))}


def k_means(points: Floats, clusters: int, random: np.random.Generator) -> Any:
    """The cluster [M] of each of `points` [M, k]: k-means (Lloyd, 1982) with k-means++ centres
    (Arthur and Vassilvitskii, 2007); fewer than `clusters` if points coincide."""
    centres = points[random.integers(len(points))][None]
    while len(centres) < clusters:
        near = _distances(points, centres).min(1)
        if near.sum() <= 0:
            break
        far = random.choice(len(points), p=near / near.sum())
        centres = np.append(centres, points[far][None], 0)
    label = np.full(len(points), -1)
    for _ in range(PASSES):
        new = _distances(points, centres).argmin(1)
        if (new == label).all():
            break
        label = new
        for each in np.unique(label):
            centres[each] = points[label == each].mean(0)
    return label


def _distances(points: Floats, centres: Floats) -> Floats:
    return np.square(points[:, None] - centres[None]).sum(2)


@dataclass(frozen=True, kw_only=True)
class ReverseConfig(reset_distribution.Config):
    """Settings of the reverse curriculum. Demonstrations known to have failed are left out."""

    every: Count = 1  # steps between saved states
    usual: Fraction = 0.2  # share of episodes that start with the environment's own reset
    enough: PositiveFraction = 0.2  # mean score at which the point moves back
    batch: Count = 20  # episodes of that mean
    width: Count = 4  # saved states before the point, from which episodes start
    stride: Count = 1  # saved states by which the point moves


class Reverse(ResetDistribution):
    """Initial states move backward along demonstrations as episodes succeed.

    Salimans and Chen, "Learning Montezuma's Revenge from a single demonstration", 2018; here with
    several demonstrations. Each has a point, at first near its end; episodes start from one of the
    `width` states before it. When the mean score of the last `batch` episodes reaches `enough`, the
    point moves `stride` states back, until episodes start with the environment's own reset.

    `point` [E]: number of states of each trajectory before its point; at 0 the trajectory is
    finished.
    """

    remembered = ("point", "recent")

    def __init__(self, config: ReverseConfig, spec: Spec, env: VecEnv, seed: int = 0) -> None:
        super().__init__(config, spec, env, seed)

    def select(self, paths: Trajectories) -> Trajectories:
        return paths.successful()

    def set_up(self) -> None:
        episode = self.paths.episode.numpy()
        count = len(self.paths.returns)
        self.first = np.searchsorted(episode, np.arange(count))
        self.size = np.bincount(episode, minlength=count)
        self.point = self.size.copy()
        self.recent = [deque(maxlen=self.config.batch) for _ in range(count)]

    def propose(self, n: int) -> list[tuple[int, Any]]:
        return [self._one(int(each)) for each in self.random.integers(len(self.point), size=n)]

    def _one(self, path: int) -> tuple[int, Any]:
        end = int(self.point[path])
        if end == 0:
            return DEFAULT_RESET, None
        low = max(end - self.config.width, 0)
        return int(self.first[path] + self.random.integers(low, end)), (path, end)

    def learn(self, states: list[int], scores: Floats, memos: list[Any]) -> None:
        """Ignores episodes that started before the point last moved."""
        for score, (path, end) in zip(scores, memos, strict=True):
            if end != self.point[path]:
                continue
            recent = self.recent[path]
            recent.append(float(score))
            if len(recent) == self.config.batch and np.mean(recent) >= self.config.enough:
                self.point[path] = max(end - self.config.stride, 0)
                recent.clear()

    def metrics(self) -> dict[str, float]:
        return {"done": float(1 - (self.point / self.size).mean())}


ROWS = ("episode", "time", "left", "togo", "after")  # of the saved states


Indices = NDArray[np.intp]
PIECE = 512  # states compared at a time


def standardised(states: Tensors, like: Tensors) -> Floats:
    """Observations of `states` [n, k], standardised by the statistics of `like`."""
    flat, all_ = _flat(states), _flat(like)
    return (flat - all_.mean(0)) / (all_.std(0) + 1e-8)


def _flat(states: Tensors) -> Floats:
    leaves = sorted(under(states, "obs").items())
    return np.concatenate(
        [leaf.double().reshape(len(leaf), -1).cpu().numpy() for _, leaf in leaves], 1
    )


def similarity(a: Floats, b: Floats, weight: float) -> Floats:
    """Similarity [n, m] in [0, 1] of states [n, k] and [m, k]."""
    return np.exp(-weight * np.square(a[:, None] - b[None]).mean(2))


def similarity_graph(paths: Trajectories, weight: float, least: float) -> tuple[Indices, Floats]:
    """For each of the M states the index of the most similar state of another trajectory [M], and
    the similarity [M]; -1 where it is below `least`. The first two states and the last one of a
    trajectory are never matched."""
    features = standardised(paths.states, paths.states)
    episode = paths.episode.numpy()
    begins = np.searchsorted(episode, episode)
    ends = np.searchsorted(episode, episode, side="right") - 1
    number = np.arange(len(episode))
    inner = (number >= begins + 2) & (number < ends)
    match, how = np.full(len(episode), -1), np.zeros(len(episode))
    for at in range(0, len(episode), PIECE):
        part = slice(at, at + PIECE)
        alike = similarity(features[part], features, weight)
        alike[:, ~inner] = 0
        alike[episode[part, None] == episode[None]] = 0
        match[part], how[part] = alike.argmax(1), alike.max(1)
    return np.where(how >= max(least, 1e-300), match, -1), how


@torch.no_grad()
def nearby_states(
    paths: Trajectories, env: VecEnv, steps: int, weight: float, random: np.random.Generator
) -> Trajectories:
    """For each state of `paths`, the one after `steps` random actions, unless the episode ended.

    Its time is that of the most similar state of its trajectory.
    """
    parts: list[Tensors] = []
    origins: list[int] = []
    for at in range(0, len(paths), env.num_envs):
        index = torch.arange(at, min(at + env.num_envs, len(paths)))
        rows = torch.arange(len(index))
        obs = env.set_state(restored(env.get_state(), rows, paths.states, index, env.state_roles))
        alive = torch.ones(env.num_envs, dtype=torch.bool)
        for _ in range(steps):
            step = env.step(_random(env, random))
            alive, obs = alive & ~step.ended.cpu(), step.obs
        kept = rows[alive[rows]]
        parts.append(tt.take(tt.to(with_obs(env.get_state(), obs), "cpu"), kept))
        origins += index[kept].tolist()
    states = tt.cat(parts)
    origin = torch.tensor(origins, dtype=torch.int64)
    features = standardised(states, paths.states)
    own = standardised(paths.states, paths.states)
    episode = paths.episode.numpy()
    like = [
        int(
            np.where(episode == episode[first], similarity(each[None], own, weight)[0], -1).argmax()
        )
        for each, first in zip(features, origin.tolist(), strict=True)
    ]
    place = torch.tensor(like, dtype=torch.int64)
    return replace(paths, states=states, **{name: getattr(paths, name)[place] for name in ROWS})


def _random(env: VecEnv, random: np.random.Generator) -> torch.Tensor:
    leaf = env.spec.act
    if leaf.dtype == "int64":
        high = int(leaf.high) if isinstance(leaf.high, int | float) else 0
        return torch.from_numpy(random.integers(high + 1, size=env.num_envs))
    shape = (env.num_envs, *leaf.shape)
    return torch.from_numpy(random.uniform(-1, 1, shape).astype(np.float32)).to(env.device)


@dataclass(frozen=True, kw_only=True)
class TrajectoryConfig(reset_distribution.Config):
    """Settings of adaptive trajectory sampling."""

    every: Count = 2  # steps between saved states
    alpha: Fraction = 1.0  # 0: trajectories are sampled uniformly; 1: by their scores
    switch: Fraction = 0.1  # probability of the most similar state of another trajectory
    stray: Fraction = 0.1  # probability of a state near the frame
    weight: NonNegative = 1.0  # w of the similarity
    least: Fraction = 1e-10  # states less similar than this are not joined
    away: Count = 3  # random steps to a nearby state


class Trajectory(ResetDistribution):
    """Adaptive sampling of SkillMimic-V2 (Yu et al., 2025): hard frames are sampled more.

    With m_f the running mean score from frame f, m <- (m + score) / 2, and m_c the mean over a
    trajectory c,

        P(c) = (1 - alpha) / C + alpha softmax(-5 m_c),      P(f | c) = softmax(-10 m_f)

    With probability `switch` the episode starts from the most similar state of another trajectory
    (the stitched trajectory graph), with probability `stray` from a state that a few random actions
    lead to from the frame (the state-transition field); its score counts for the frame. The reward
    is the task's, not how closely a reference is followed, so the paper's masked frames are not
    needed. The paper compares body positions and velocities; here standardised observations z are
    compared:

        sim(i, j) = exp(-w mean (z_i - z_j)^2)

    The first `frames` states of `paths` are of demonstrations, the others nearby ones.
    """

    remembered = ("means", "frames", "origin")

    def __init__(self, config: TrajectoryConfig, spec: Spec, env: VecEnv, seed: int = 0) -> None:
        if config.switch + config.stray > 1:
            raise ConfigError("teacher: switch + stray has to be at most 1")
        super().__init__(config, spec, env, seed)
        self.frames = len(self.paths)
        more = nearby_states(self.paths, env, config.away, config.weight, self.random)
        self.paths = joined(self.paths, more)
        self.set_up()
        frame = {key: i for i, key in enumerate(self._keys(slice(0, self.frames)))}
        self.origin = np.array(
            [frame[key] for key in self._keys(slice(self.frames, None))], np.intp
        )

    def select(self, paths: Trajectories) -> Trajectories:
        return paths.successful()

    def set_up(self) -> None:
        self.frames = getattr(self, "frames", len(self.paths))
        shown = part(self.paths, self.frames)
        self.match, _ = similarity_graph(shown, self.config.weight, self.config.least)
        self.clip = shown.episode.numpy()
        self.means = np.zeros(self.frames)

    def propose(self, n: int) -> list[tuple[int, Any]]:
        clips, frames = self.chances()
        drawn = self.random.choice(len(clips), size=n, p=clips)
        return [self._one(frames, int(each)) for each in drawn]

    def chances(self) -> tuple[Floats, Floats]:
        """P(c) [C], and P(f | c) [frames]."""
        count = np.bincount(self.clip)
        hard = np.exp(-5 * np.bincount(self.clip, self.means) / count)
        clips = (1 - self.config.alpha) / len(count) + self.config.alpha * hard / hard.sum()
        frames = np.exp(-10 * self.means)
        return clips, frames / np.bincount(self.clip, frames)[self.clip]

    def _one(self, frames: Floats, clip: int) -> tuple[int, Any]:
        within = np.flatnonzero(self.clip == clip)
        frame = int(self.random.choice(within, p=frames[within]))
        config, chance = self.config, self.random.random()
        if chance < config.switch:
            there = int(self.match[frame])
            return (there if there >= 0 else frame), frame
        if chance < config.switch + config.stray:
            near = np.flatnonzero(self.origin == frame)
            return (self.frames + int(self.random.choice(near)) if len(near) else frame), frame
        return frame, frame

    def learn(self, states: list[int], scores: Floats, memos: list[Any]) -> None:
        for score, frame in zip(scores, memos, strict=True):
            self.means[frame] = (self.means[frame] + score) / 2

    def set_state(self, state: dict[str, Any]) -> None:
        self.frames = state["frames"]
        super().set_state(state)

    def metrics(self) -> dict[str, float]:
        return {"mean": float(self.means.mean()), "joined": float((self.match >= 0).mean())}

    def _keys(self, where: slice) -> list[tuple[int, int]]:
        pairs = zip(
            self.paths.episode[where].tolist(), self.paths.time[where].tolist(), strict=True
        )
        return list(pairs)


def joined(first: Trajectories, then: Trajectories) -> Trajectories:
    states = tt.cat([first.states, {key: then.states[key] for key in first.states}])
    rows = {name: torch.cat([getattr(first, name), getattr(then, name)]) for name in ROWS}
    return replace(first, states=states, **rows)


def part(paths: Trajectories, count: int) -> Trajectories:
    rows = {name: getattr(paths, name)[:count] for name in ROWS}
    return replace(paths, states=tt.each(paths.states, lambda leaf: leaf[:count]), **rows)
