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


class Frozen(PolicyWrapper):
    """A frozen `base` policy, whose carry is under `base/`."""

    def __init__(self, config: Any, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.base = build(config.base, Policy, spec=spec).requires_grad_(False)

    def initial(self, n: int) -> Tensors:
        return nest(self.base.initial(n), "base")

    def base_act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        """One decision of `base`: its chunk [n, H, A] and its carry under `base/`."""
        seen, kept = self.base.observe(obs, under(carry, "base"), noise)
        actions, kept = self.base.act(seen, kept, noise)
        return actions, nest(kept, "base")


class Steered(Frozen):
    """A frozen `base` policy and a trainable `inner` policy."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.inner = build(config.inner, Policy, spec=self.inner_spec(config, spec))

    @classmethod
    def wrap(
        cls, base: Policy, node: Mapping[str, Any], inner: Mapping[str, Any] | None = None
    ) -> Self:
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
        return self.inner

    def with_trained(self, trained: Policy) -> Policy:
        self.inner = trained
        return self
