"""SamplerStep: one step of a diffusion or flow sampler, in a form that guidance can modify.

A policy with `strides(obs, noise) -> (x, strides)` and `range` (its action normaliser) supports
guidance: x [n, D] is the initial sample, and each step predicts the final normalised chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class SamplerStep(NamedTuple):
    """One sampler step at a level with x = keep x_1 + remain z, chunk x_1 and noise z. `clean(x)`:
    the predicted chunk [n, D], differentiable; `onward(x, x_1)`: x at the next level."""

    keep: float
    remain: float
    clean: Callable[[Tensor], Tensor]
    onward: Callable[[Tensor, Tensor], Tensor]


def sample(x: Tensor, strides: list[SamplerStep]) -> Tensor:
    """Run the sampler without guidance; returns the normalised chunk [n, D], not clipped."""
    for stride in strides:
        x = stride.onward(x, stride.clean(x))
    return x
