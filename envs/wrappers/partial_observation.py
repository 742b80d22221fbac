"""Partial: keeps only selected elements of an observation (partial observability).

    seen = o[elements]

An environment without velocities is the usual test of memory (Hausknecht and Stone, 2015).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embodied.core.bounds import CountOrZero
from embodied.core.build import ConfigError, nearest
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Bound, Leaf
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper


@dataclass(frozen=True)
class Config:
    """Settings of partial observations; leaves that are not named are unchanged."""

    elements: Mapping[str, tuple[CountOrZero, ...]]  # indices to keep, in order, by leaf


class Partial(Wrapper):
    """Policies and critics observe only selected elements of some leaves."""

    def __init__(self, config: Config, env: VecEnv) -> None:
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

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        return self.transform_obs(self.env.reset(seed, task, mask))

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        following = self.transform_obs(step.next_obs)
        obs = following if step.obs is step.next_obs else self.transform_obs(step.obs)
        return replace(step, obs=obs, next_obs=following)

    def transform_obs(self, obs: Tensors) -> Tensors:
        parts = {name: obs[name].index_select(1, index) for name, index in self.index.items()}
        return {**obs, **parts}


def part(name: str, leaf: Leaf, elements: tuple[int, ...]) -> Leaf:
    """The leaf of some elements of a vector."""
    size = leaf.shape[0] if len(leaf.shape) == 1 else 0
    if not elements or not all(0 <= element < size for element in elements):
        raise ConfigError(
            f"Partial: elements {list(elements)} are invalid for {name}{list(leaf.shape)}; list "
            "the "
            "indices of elements of a vector, from 0"
        )

    def chosen(bound: Bound) -> Bound:
        return tuple(bound[e] for e in elements) if isinstance(bound, tuple) else bound

    names = tuple(leaf.names[e] for e in elements) if leaf.names else ()
    shape = (len(elements),)
    low = chosen(leaf.low)
    high = chosen(leaf.high)
    return replace(leaf, shape=shape, low=low, high=high, names=names)
