"""ObservationNoise: Gaussian noise per step and a constant Gaussian bias per episode.

    observed_e = o_e + deviation_e n_e,t + bias_e m_e,      n, m ~ N(0, 1)

for elements e of a vector by name; m is drawn once per episode. The error of a relative element
`A_from_B` follows from those of A and B, as on a robot that computes it from both.

Partial keeps only selected elements of an observation: an environment without velocities is the
usual test of memory (Hausknecht and Stone, 2015).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from embodied.core.bounds import CountOrZero, NonNegative
from embodied.core.build import ConfigError, nearest
from embodied.core.env import StateRoles, VecEnv
from embodied.core.spec import Bound, Leaf
from embodied.core.tensors import Tensors
from embodied.envs.row_rng import RowRng
from embodied.envs.wrappers.stack import EpisodeWrapper

STEM = re.compile(r"(_[xyz]|\d+)$")
APART = re.compile(r"(.+)_from_(.+)_([xyz])")


@dataclass(frozen=True)
class Config:
    """Standard deviations by element name, in the elements' units.

    A name is that of an element, or of a group without axis or number: `dq` is dq1 to dq7, `cube`
    the cube's x, y, z. Elements without names are called as their leaf: state0, state1, ...
    """

    deviation: Mapping[str, NonNegative] = field(default_factory=dict)  # noise of each step
    bias: Mapping[str, NonNegative] = field(default_factory=dict)  # constant of an episode
    leaf: str = "state"  # the observation that gets it


class ObservationNoise(EpisodeWrapper):
    """Policies and demonstrators observe the noise; reward and success are computed without it."""

    memory_roles = StateRoles(generators={"generator": None})

    def __init__(self, config: Config, env: VecEnv) -> None:
        super().__init__(env)
        self.leaf = config.leaf
        leaf = env.spec.obs.get(config.leaf)
        if leaf is None or len(leaf.shape) != 1:
            raise ConfigError(f'ObservationNoise: "{config.leaf}" is no vector that is observed')
        self.names = leaf.names or tuple(f"{config.leaf}{i}" for i in range(leaf.size))
        self.deviation, self.bias = (
            self._by_element(each).to(env.device) for each in (config.deviation, config.bias)
        )
        # [names, names]: what each element's own error does to all of them.
        names = self.names
        mixing = torch.eye(len(names))
        for at, name in enumerate(names):
            if apart := APART.fullmatch(name):
                one, other, axis = apart.groups()
                for whole, sign in ((f"{one}_{axis}", 1.0), (f"{other}_{axis}", -1.0)):
                    if whole in names:
                        mixing[names.index(whole), at] = sign
        self.mixing = mixing.to(env.device)
        self.streams = RowRng(self.depth << 40, env.num_envs, env.device)
        self.memory["generator"] = self.streams.state
        self.memory["bias"] = torch.zeros(env.num_envs, len(self.names), device=env.device)
        self.memory["noise"] = torch.zeros_like(self.memory["bias"])

    def see(self, obs: Tensors) -> None:
        self.memory["noise"] = self._noise(None) * self.deviation

    def transform_obs(self, obs: Tensors) -> Tensors:
        off = (self.memory["bias"] + self.memory["noise"]) @ self.mixing
        return {**obs, self.leaf: obs[self.leaf] + off}

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        index = rows.nonzero().flatten()
        self.memory["bias"][index] = self._noise(index) * self.bias
        self.memory["noise"][index] = self._noise(index) * self.deviation

    def _noise(self, rows: Tensor | None) -> Tensor:
        self.streams.state = self.memory["generator"]
        return self.streams.normal(len(self.names), rows).T

    def _by_element(self, given: Mapping[str, float]) -> Tensor:
        """[names], zero where nothing is given."""
        stems = [STEM.sub("", name) for name in self.names]
        wide = torch.zeros(len(self.names))
        for name, value in given.items():
            known = [name in pair for pair in zip(self.names, stems, strict=True)]
            if not any(known):
                raise ConfigError(
                    "ObservationNoise: unknown element "
                    f'"{name}"{nearest(name, (*self.names, *stems))}'
                )
            wide[torch.tensor(known)] = value
        return wide


@dataclass(frozen=True)
class PartialConfig:
    """Settings of partial observations; leaves that are not named are unchanged."""

    elements: Mapping[str, tuple[CountOrZero, ...]]  # indices to keep, in order, by leaf


class Partial(EpisodeWrapper):
    """Policies and critics observe only selected elements of some leaves."""

    def __init__(self, config: PartialConfig, env: VecEnv) -> None:
        leaves = dict(env.spec.obs)
        for name, elements in config.elements.items():
            if name not in leaves:
                raise ConfigError(f'Partial: unknown observation "{name}"{nearest(name, leaves)}')
            leaves[name] = part(name, leaves[name], elements)
        super().__init__(env, replace(env.spec, obs=leaves))
        self.index = {
            name: torch.tensor(elements, device=env.device)
            for name, elements in config.elements.items()
        }

    def transform_obs(self, obs: Tensors) -> Tensors:
        parts = {name: obs[name].index_select(1, index) for name, index in self.index.items()}
        return {**obs, **parts}


def part(name: str, leaf: Leaf, elements: tuple[int, ...]) -> Leaf:
    size = leaf.shape[0] if len(leaf.shape) == 1 else 0
    if not elements or not all(0 <= element < size for element in elements):
        raise ConfigError(
            f"Partial: elements {list(elements)} are invalid for {name}{list(leaf.shape)}; list "
            "the indices of elements of a vector, from 0"
        )

    def chosen(bound: Bound) -> Bound:
        return tuple(bound[e] for e in elements) if isinstance(bound, tuple) else bound

    names = tuple(leaf.names[e] for e in elements) if leaf.names else ()
    low = chosen(leaf.low)
    high = chosen(leaf.high)
    return replace(leaf, shape=(len(elements),), low=low, high=high, names=names)
