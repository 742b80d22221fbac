"""Dsrl: reinforcement learning in the latent noise of a frozen diffusion or flow policy.

DSRL (Wagenmaker et al., 2025). The inner policy's action is u in [-1, 1]^d; the base maps it to a
chunk: a = base(o, w = bound * u). `bound` is the trust region: if too small, the inner policy
cannot leave a bad mode of the base; if too large, the noise is out of the base's training
distribution. The base must be deterministic given its noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from embodied.core.bounds import Positive
from embodied.core.build import ConfigError, build
from embodied.core.device import device_of, forked
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.policies.abilities import ProbesNoise
from embodied.policies.steering import steered
from embodied.policies.steering.steered import Steered

PROBES = 8  # noise samples of the test for an effect
LEAST = 1e-6  # the least effect


@dataclass(frozen=True)
class Config(steered.Config):
    """Settings of DSRL.

    With `shared_noise` the inner policy chooses 32 numbers instead of 1,600 on pi0.
    """

    bound: Positive = 1.5  # largest noise per element (the authors: 1 to 2.5)
    shared_noise: bool = False  # choose one step's noise, repeated over the base's chunk


class Dsrl(Steered):
    """DSRL: a base policy whose noise the inner policy chooses; the learner's action is u."""

    def __init__(self, config: Config, spec: Spec) -> None:
        self.bound = config.bound
        super().__init__(config, spec)
        if isinstance(self.base, ProbesNoise):
            self.base.require_noise()
        self.chunk = self.base.chunk
        self.noise_shape = self.base.sample_noise(1).shape[1:]
        self.shared_steps = shared_steps(self.base) if config.shared_noise else 1

    @classmethod
    def wrap(
        cls, base: Policy, node: Mapping[str, Any], inner: Mapping[str, Any] | None = None
    ) -> Self:
        """As in `Steered`; ConfigError for a base whose actions do not depend on its noise."""
        require_steerable(base)
        return super().wrap(base, node, inner)

    def inner_spec(self, config: Config, spec: Spec) -> Spec:
        size = math.prod(self.base.sample_noise(1).shape[1:])
        if config.shared_noise:
            size //= shared_steps(self.base)
        return spec.with_act(Leaf((size,), low=-1.0, high=1.0))

    def base_noise(self, u: Tensor) -> Tensor:
        """The base's noise [n, *noise_shape] for the inner policy's actions `u` [n, d]."""
        w = self.bound * u
        if self.shared_steps > 1:
            w = w[:, None].expand(-1, self.shared_steps, -1)
        return w.reshape(-1, *self.noise_shape)

    def initial(self, n: int) -> Tensors:
        device = device_of(self)
        return {**super().initial(n), "row/action": self.inner.spec.act.zeros(n, device)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.inner.sample_noise(n, explore)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        u = self.inner.act(obs, {}, noise)[0].squeeze(1)
        actions, carry = self.base_act(obs, carry, self.base_noise(u))
        return actions, {**carry, "row/action": u}

    def warmup_policy(self) -> Policy:
        """The base policy with normal noise, clipped to the bound."""
        inner = {"_target_": "embodied.policies.random.Random", "clip": self.bound}
        other = build({**self.node, "inner": inner}, type(self), spec=self.spec)
        other.base = self.base
        return other


def shared_steps(base: Policy) -> int:
    """The number of time steps that the noise of `base` has; ConfigError if it has none."""
    shape = base.sample_noise(1).shape[1:]
    steps = base.noise_steps or (shape[0] if len(shape) == 2 else 0)
    if not steps or math.prod(shape) % steps:
        raise ConfigError(
            f"the noise {list(shape)} of {type(base).__name__} is not one vector for each time "
            "step: shared_noise=false"
        )
    return steps


@torch.no_grad()
def require_steerable(base: Policy) -> None:
    """ConfigError if the actions of `base` are the same for any noise, at random observations."""
    if isinstance(base, ProbesNoise):
        base.require_noise()
    device = device_of(base)
    with forked(0):
        obs = {name: leaf.sample(1).to(device) for name, leaf in base.spec.obs.items()}
        noise = torch.randn(PROBES, *base.sample_noise(1).shape[1:], device=device)
    obs = {name: value.expand(PROBES, *value.shape[1:]) for name, value in obs.items()}
    seen, carry = base.observe(obs, base.initial(PROBES), noise)
    actions = base.act(seen, carry, noise)[0].float()
    if (actions - actions[:1]).abs().max() <= LEAST:
        raise ConfigError(
            f"the actions of {type(base).__name__} do not depend on its noise: there is nothing to "
            "steer; finetune=residual and finetune=expo work with it"
        )
