"""Abilities that only some policies have, for programs that take any policy.

A policy has an ability by having its method; a wrapper that passes one on calls the function here
with its base.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.nn import Parameter

from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors


@runtime_checkable
class Smooths(Protocol):
    """A policy that acts on observations with noise, for which certificates are known."""

    def noise_std(self) -> float:
        """Standard deviation of that noise, in the observations' own units; 0: there is none."""
        ...


@runtime_checkable
class HasLogProb(Protocol):
    """A policy that knows the log-probabilities of actions, given the observation alone."""

    chunk: int

    def log_prob(self, obs: Tensors, action: Tensor) -> Tensor:
        """Log-probability [n] of stored actions [n, D], differentiable in the parameters."""
        ...

    def parameters(self) -> Iterator[Parameter]: ...


@runtime_checkable
class HasGaussian(Protocol):
    """A policy without memory whose actions, when it explores, are normally distributed, or tanh
    of such numbers if it is `squashed`."""

    @property
    def squashed(self) -> bool: ...

    def gaussian(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation of them, [n, chunk * A] each, not clipped."""
        ...


@runtime_checkable
class FiltersLatents(Protocol):
    """A policy that filters a model's latents, from which another policy inside of it acts."""

    @property
    def latent_policy(self) -> Policy:
        """The policy inside, which acts in the model itself."""
        ...


@runtime_checkable
class Corrects(Protocol):
    """A policy that corrects the actions of a base, of whose chunks it executes `execute` steps.
    Its learner observes the base's action as `base_action`."""

    base: Policy
    execute: int

    def described(self, base_action: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Somebody's `action` [n, A], where the base's is `base_action` [n, A], as the base's
        action [n, A] and the learner's [n, D] that make it."""
        ...


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


@runtime_checkable
class TakesPrompts(Protocol):
    """A policy of every reward, which a vector tells what to maximise."""

    def embed(self, obs: Tensors) -> Tensor:
        """What it knows of states, B [n, d] of observations [n, ...]."""
        ...

    def prompt(self, u: Tensor) -> None:
        """Set the vector [d] that it follows from now on; its length does not matter."""


@runtime_checkable
class ActsAs(Protocol):
    """A policy that acts as one of the policies inside of it."""

    def acts_as(self) -> Policy:
        """The policy inside; ConfigError where it is more than that one."""
        ...


def acts_as(policy: Policy) -> Policy:
    """The policy itself, or the one inside of it that acts the same; ConfigError."""
    return policy.acts_as() if isinstance(policy, ActsAs) else policy


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
