"""Protocols of policies that PPO can train: StochasticPolicy, RecurrentPolicy.

`isinstance` checks methods alone: from Python 3.12 on it does not find submodules of a Module.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from embodied.core.tensors import Tensors
from embodied.policies.networks.encoders import Encoder


class HasEncoder(Protocol):
    """A policy whose `encoder` holds its observation normaliser."""

    encoder: Encoder


@runtime_checkable
class StochasticPolicy(Protocol):
    """A policy with log-probabilities."""

    def evaluate_actions(self, obs: Tensors, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, [n] each, of stored actions."""
        ...


@runtime_checkable
class RecurrentPolicy(Protocol):
    """A policy with a recurrent state of `width` numbers."""

    width: int

    def evaluate_sequence(
        self, obs: Tensors, action: Tensor, carry: Tensors, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, [T, B] each, of sequences of stored actions."""
        ...
