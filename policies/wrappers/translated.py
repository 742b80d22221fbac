"""Translated: base class of policies that put what another one sees and does into other terms."""

from __future__ import annotations

from typing import Self

from torch import Tensor

from embodied.core.policy import Policy
from embodied.policies.abilities import with_real_time_chunking


class Translated(Policy):
    """Noise, chunk and parameters are those of `base`, which is trained. A subclass translates in
    `act`, and has `around`."""

    base: Policy

    def around(self, base: Policy) -> Self:
        """The same translation of another base with the same spec."""
        raise NotImplementedError(f"{type(self).__name__} does not implement around")

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.chunk = self.base.chunk  # some policies replan every step outside of training
        return self

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.base.sample_noise(n, explore)

    def inference_policy(self) -> Policy:
        inner = self.base.inference_policy()
        return self if inner is self.base else self.around(inner)

    def with_real_time_chunking(self, mode: str) -> Policy:
        return self.around(with_real_time_chunking(self.base, mode))
