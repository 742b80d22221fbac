"""SamplerStep: one step of a generative policy's sampler, which guidance can change.

A policy with `strides(obs, noise) -> (x, strides)` and `range` can be guided: x [n, D] is where it
begins, and every stride first says which normalised chunk it is heading for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from embodied.moved import attributes


class SamplerStep(NamedTuple):
    """At this level x = keep x_1 + remain z, of a chunk x_1 and noise z. `clean(x)`: the chunk
    [n, D] that the network expects, differentiable; `onward(x, x_1)`: x at the next level."""

    keep: float
    remain: float
    clean: Callable[[Tensor], Tensor]
    onward: Callable[[Tensor, Tensor], Tensor]


def sample(x: Tensor, strides: list[SamplerStep]) -> Tensor:
    """The chunk [n, D] without any change on the way, cut off at the box."""
    for stride in strides:
        x = stride.onward(x, stride.clean(x))
    return x.clamp(-1, 1)


__getattr__ = attributes(__name__)
