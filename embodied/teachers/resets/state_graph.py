"""Stitched trajectory graph and state-transition field of SkillMimic-V2 (Yu et al., 2025).

The graph joins each state to the most similar state of another trajectory; the field has states
that lie near the trajectories. The paper compares body positions and velocities; here standardised
observations z are compared:

    sim(i, j) = exp(-w mean (z_i - z_j)^2)

A nearby state is reached by a few random actions, so it is always physically possible.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core import tensors as tt
from embodied.core.env import VecEnv
from embodied.core.tensors import Tensors, under
from embodied.teachers.resets.state_library import Trajectories, restored, with_obs
from embodied.teachers.task_space import Floats

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
        state = tt.to(with_obs(env.get_state(), obs), "cpu")
        parts.append(tt.take(state, kept))
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
    names = ("episode", "time", "left", "togo", "after")
    return replace(paths, states=states, **{name: getattr(paths, name)[place] for name in names})


def _random(env: VecEnv, random: np.random.Generator) -> torch.Tensor:
    leaf = env.spec.act
    if leaf.dtype == "int64":
        high = int(leaf.high) if isinstance(leaf.high, int | float) else 0
        return torch.from_numpy(random.integers(high + 1, size=env.num_envs))
    shape = (env.num_envs, *leaf.shape)
    return torch.from_numpy(random.uniform(-1, 1, shape).astype(np.float32)).to(env.device)
