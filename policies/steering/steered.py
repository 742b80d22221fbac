"""Steered: base class of policies with a frozen base policy and a small trainable inner policy.

A subclass defines the inner policy's spec (`inner_spec`) and maps its action to the robot's. To the
learner this is an ordinary environment with another action space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, nest, under


@dataclass(frozen=True)
class Config:
    """Settings of a policy that steers another; complete nodes make a checkpoint self-contained."""

    base: Node  # node of the steered policy
    inner: Node  # node of the policy that steers


class Steered(PolicyWrapper):
    """A frozen `base` policy (its carry is under `base/`) and a trainable `inner` policy."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.base = build(config.base, Policy, spec=spec).requires_grad_(False)
        self.inner = build(config.inner, Policy, spec=self.inner_spec(config, spec))

    @classmethod
    def wrap(
        cls, base: Policy, node: Mapping[str, Any], inner: Mapping[str, Any] | None = None
    ) -> Self:
        """Build `node` around the frozen `base`, with a new inner policy `inner`."""
        if inner is None:
            raise ConfigError(
                f"{cls.__name__} needs a small inner policy to train: policy=gaussian"
            )
        steered = build({**node, "base": base.node, "inner": inner}, cls, spec=base.spec)
        steered.load_base(base)
        return steered

    def inner_spec(self, config: Any, spec: Spec) -> Spec:
        """The inner policy's spec: its observations and its action."""
        raise NotImplementedError

    def trainable(self) -> Policy:
        """The inner policy."""
        return self.inner

    def with_trained(self, trained: Policy) -> Policy:
        """This policy with `trained` as its inner policy."""
        self.inner = trained
        return self

    def with_inner(self, node: Node) -> Self:
        """This policy with another inner policy, built from `node` (for warm-up)."""
        other = build({**self.node, "inner": node}, type(self), spec=self.spec)
        other.base = self.base
        return other

    def initial(self, n: int) -> Tensors:
        return nest(self.base.initial(n), "base")

    def base_act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        """As `decide`, with this policy's base."""
        return decide(self.base, obs, carry, noise)


def decide(base: Policy, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
    """One decision of `base`: its chunk [n, H, A] and its carry under `base/`."""
    kept = under(carry, "base")
    seen, kept = base.observe(obs, kept, noise)
    actions, kept = base.act(seen, kept, noise)
    return actions, nest(kept, "base")
