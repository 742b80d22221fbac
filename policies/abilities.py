"""Abilities that only some policies have, for programs that take any policy.

A policy has an ability by having its method; a wrapper that passes one on calls the function here
with its base.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.policy import Policy


@runtime_checkable
class HasReflex(Protocol):
    """A policy with a reflex, which a robot's safety chain can have in its place."""

    def without_reflex(self) -> Policy:
        """The task policy alone, at its own rate."""
        ...


@runtime_checkable
class Continues(Protocol):
    """A policy whose chunks can continue the chunk that is being executed."""

    def with_real_time_chunking(self, mode: str) -> Policy:
        """See the function of this name."""
        ...


@runtime_checkable
class HasDataRanges(Protocol):
    """A policy in physical units that keeps how far its training data reach."""

    def data_ranges(self) -> dict[str, Tensor]:
        """Low and high values [2, size] of `action` and of `obs/NAME` in its data (extremes,
        quantiles or mean -+ standard deviation, as it was trained), in the units of its Spec."""
        ...


@runtime_checkable
class ProbesNoise(Protocol):
    """A policy that cannot tell without asking whether its noise decides on its actions."""

    def require_noise(self) -> None:
        """Raise ConfigError if noise that a caller chooses does not decide on the actions."""
        ...


def without_reflex(policy: Policy) -> Policy:
    """The policy that a robot's policy process runs, without a reflex."""
    return policy.without_reflex() if isinstance(policy, HasReflex) else policy


def with_real_time_chunking(policy: Policy, mode: str) -> Policy:
    """`policy` with chunks that continue the chunk being executed; `mode`: "guided" or "hard".

    The result's carry has `executed_steps` and `delay`. ConfigError for a policy without a sampler
    that can be guided.
    """
    if not isinstance(policy, Continues):
        raise ConfigError(
            f"{type(policy).__name__} has no sampler that could be guided (flow and diffusion "
            "policies have)"
        )
    return policy.with_real_time_chunking(mode)
