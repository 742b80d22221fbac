"""Adaptive trajectory sampling (SkillMimic-V2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core import tensors as tt
from embodied.core.bounds import Count, Fraction, NonNegative
from embodied.core.build import ConfigError
from embodied.core.env import VecEnv, restored
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.teachers.resets import reset_distribution
from embodied.teachers.resets.reset_distribution import (
    ResetDistribution,
    Trajectories,
    with_obs,
)
from embodied.teachers.teacher import Floats

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
