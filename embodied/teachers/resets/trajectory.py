"""Adaptive trajectory sampling of SkillMimic-V2 (Yu et al., 2025): hard frames are sampled more.

With m_f the running mean score from frame f, m <- (m + score) / 2, and m_c the mean over a
trajectory c,

    P(c) = (1 - alpha) / C + alpha softmax(-5 m_c),      P(f | c) = softmax(-10 m_f)

With probability `switch` the episode starts from the most similar state of another trajectory (the
stitched trajectory graph), with probability `stray` from a state near the frame (the
state-transition field); its score counts for the frame. The reward is the task's, not how closely a
reference is followed, so the paper's masked frames are not needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from embodied.core import tensors as tt
from embodied.core.bounds import Count, Fraction, NonNegative
from embodied.core.build import ConfigError
from embodied.core.env import VecEnv
from embodied.core.spec import Spec
from embodied.teachers.resets import reset_distribution
from embodied.teachers.resets.reset_distribution import ResetDistribution
from embodied.teachers.resets.state_graph import nearby_states, similarity_graph
from embodied.teachers.resets.state_library import Trajectories
from embodied.teachers.task_space import Floats


@dataclass(frozen=True, kw_only=True)
class Config(reset_distribution.Config):
    """Settings of adaptive trajectory sampling."""

    every: Count = 2  # steps between saved states
    alpha: Fraction = 1.0  # 0: trajectories are sampled uniformly; 1: by their scores
    switch: Fraction = 0.1  # probability of the most similar state of another trajectory
    stray: Fraction = 0.1  # probability of a state near the frame
    weight: NonNegative = 1.0  # w of the similarity
    least: Fraction = 1e-10  # states less similar than this are not joined
    away: Count = 3  # random steps to a nearby state


class Trajectory(ResetDistribution):
    """The first `frames` states of `paths` are of demonstrations, the others nearby ones."""

    remembered = ("means", "frames", "origin")

    def __init__(self, config: Config, spec: Spec, env: VecEnv, seed: int = 0) -> None:
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


ROWS = ("episode", "time", "left", "togo", "after")


def joined(first: Trajectories, then: Trajectories) -> Trajectories:
    """The states of both; they belong to the same episodes."""
    states = tt.cat([first.states, {key: then.states[key] for key in first.states}])
    rows = {name: torch.cat([getattr(first, name), getattr(then, name)]) for name in ROWS}
    return replace(first, states=states, **rows)


def part(paths: Trajectories, count: int) -> Trajectories:
    """The first `count` states."""
    rows = {name: getattr(paths, name)[:count] for name in ROWS}
    return replace(paths, states=tt.each(paths.states, lambda leaf: leaf[:count]), **rows)
