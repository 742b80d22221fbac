"""Stitched: which states of several trajectories are alike, and states beside them.

From SkillMimic-V2 (Yu et al., 2025): the stitched trajectory graph joins each state to the most
similar one of another trajectory, the state-transition field holds states that nobody showed. There
states are bodies' positions and speeds; here they are observations z, each element standardised,

    sim(i, j) = exp(-w mean (z_i - z_j)^2)

and what lies beside a state is where a few random actions lead from it: always a state that can be.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core import tensors as tt
from embodied.core.env import VecEnv
from embodied.core.tensors import Tensors, under
from embodied.teachers.resets.state_library import Trajectories, moved
from embodied.teachers.task_space import Floats

Places = NDArray[np.intp]
PIECE = 512  # states compared at once


def standardised(states: Tensors, like: Tensors) -> Floats:
    """Observations of `states` [n, k], in deviations of those of `like`."""
    flat, all_ = _flat(states), _flat(like)
    return (flat - all_.mean(0)) / (all_.std(0) + 1e-8)


def _flat(states: Tensors) -> Floats:
    leaves = sorted(under(states, "obs").items())
    return np.concatenate([leaf.double().flatten(1).cpu().numpy() for _, leaf in leaves], 1)


def similarity(a: Floats, b: Floats, weight: float) -> Floats:
    """[n, m] in [0, 1] of states [n, k] and [m, k]."""
    return np.exp(-weight * np.square(a[:, None] - b[None]).mean(2))


def graph(paths: Trajectories, weight: float, least: float) -> tuple[Places, Floats]:
    """For each of the M states the most similar one of another trajectory [M], and how similar it
    is; -1 where none is as similar as `least`. A trajectory's first two states and its last are
    nobody's match: they are hardly in the middle of anything."""
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
def beside(
    paths: Trajectories, env: VecEnv, steps: int, weight: float, random: np.random.Generator
) -> Trajectories:
    """A state `steps` random actions away from each, as `paths` are; its time is that of the most
    similar state of its own trajectory. Where an episode ended on the way there is none."""
    parts: list[Tensors] = []
    origins: list[int] = []
    for at in range(0, len(paths), env.num_envs):
        index = torch.arange(at, min(at + env.num_envs, len(paths)))
        rows = torch.arange(len(index))
        env.set_state(moved(env.get_state(), rows, paths.states, index))
        alive = torch.ones(env.num_envs, dtype=torch.bool)
        for _ in range(steps):
            alive &= ~env.step(_random(env, random)).ended.cpu()
        kept = rows[alive[rows]]
        state = tt.to(env.get_state(), "cpu")
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
