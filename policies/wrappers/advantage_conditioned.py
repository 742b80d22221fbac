"""AdvantageConditioned: a sampled policy that knows how good its training actions were (RECAP).

RECAP of pi*0.6 (Physical Intelligence, 2025). The base observes a label c of every chunk that it
imitates: POSITIVE or NEGATIVE (its advantage was above a threshold or not), or NONE (the label was
dropped, with probability `drop`). It acts with POSITIVE. Guidance (classifier-free; Ho and
Salimans, 2022; Frans et al., 2025) moves every sampler step further from NONE:

    x_1 <- x_1(x, NONE) + w (x_1(x, POSITIVE) - x_1(x, NONE))

x_1(x, c) is the chunk that a step predicts. Of a flow it is linear in the velocity, so this is
v <- v(NONE) + w (v(POSITIVE) - v(NONE)). w = 1, no guidance, takes one network call per step, other
weights two. The paper uses 1 to 2.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.core.bounds import Chunk, Fraction, NonNegative
from embodied.core.build import ConfigError, Node
from embodied.core.spec import SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.policies.encoded import build_with_chunk, require_continuous
from embodied.policies.wrappers.real_time_chunking import GuidedSampler, SamplerStep, sample

LABEL = "advantage_label"
"""The base's observation, and the column of a batch [n] (int64)."""
NONE, NEGATIVE, POSITIVE = range(3)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of conditioning on the advantage."""

    base: Node  # node of a policy whose sampler can be guided
    guidance: NonNegative = 1.0  # w; 1: none, 0: the imitation of all chunks
    drop: Fraction = 0.3  # share of training samples without a label
    chunk: Chunk | None = None  # actions of one decision (null: the base's)


class AdvantageConditioned(GuidedSampler):
    """Noise, chunk and sampler are the base's."""

    base: Any  # a Policy with `strides`, `goal` and `to_actions`

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        require_continuous(spec)
        label = Leaf((), "int64", 0, POSITIVE, SYMBOL)
        seen = spec.with_obs(**{LABEL: label})
        self.base = build_with_chunk(config.base, config.chunk, seen)
        if not hasattr(self.base, "strides"):
            raise ConfigError(
                "base should be a policy whose sampler can be guided: a flow or diffusion policy"
            )
        if self.base.initial(1):
            raise ConfigError("this policy observes the present only: base.obs_steps=1")
        self.spec = spec
        self.config = config
        self.chunk = self.base.chunk
        self.noise_steps = self.base.noise_steps

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.base.sample_noise(n, explore)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        if self.config.guidance == 1:
            return self.base.act(labelled(obs, noise, POSITIVE), carry, noise)
        return self.to_actions(sample(*self.strides(obs, noise))), carry

    def strides(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, list[SamplerStep]]:
        """The initial sample and the guided steps, which real-time chunking may guide further."""
        x, wanted = self.base.strides(labelled(obs, noise, POSITIVE), noise)
        if self.config.guidance == 1:
            return x, wanted
        _, free = self.base.strides(labelled(obs, noise, NONE), noise)
        return x, [self.guided(*pair) for pair in zip(wanted, free, strict=True)]

    def guided(self, wanted: SamplerStep, free: SamplerStep) -> SamplerStep:
        """The step whose chunk is moved from that of `free` through that of `wanted`."""
        w = self.config.guidance
        return wanted._replace(clean=lambda x: torch.lerp(free.clean(x), wanted.clean(x), w))

    def goal(self, plan: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.base.goal(plan, weight)

    def to_actions(self, x: Tensor) -> Tensor:
        """The actions [n, chunk, A] of normalised chunks [n, D]."""
        return self.base.to_actions(x)

    def loss(self, batch: Tensors) -> Tensor:
        """The base's imitation loss [n], with labels dropped at random. A batch without the column
        `advantage_label` is of demonstrations that are all taken to be good."""
        action = batch["action"]
        good = torch.full((len(action),), POSITIVE, device=action.device)
        label = batch.get(LABEL, good)
        dropped = torch.rand(len(action), device=action.device) < self.config.drop
        return self.base.loss({**batch, f"obs/{LABEL}": label.masked_fill(dropped, NONE)})

    def fit(self, rows: Tensors) -> None:
        self.base.fit(rows)


def labelled(obs: Tensors, noise: Tensor, label: int) -> Tensors:
    """`obs` with one label in all of the decisions of `noise` [n, ...]."""
    return {**obs, LABEL: torch.full((noise.shape[0],), label, device=noise.device)}
