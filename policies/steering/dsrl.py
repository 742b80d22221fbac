"""DSRL: reinforcement learning in the latent noise of a frozen diffusion or flow policy.

DSRL (Wagenmaker et al., 2025). The inner policy's action is u in [-1, 1]^d; the base maps it to an
chunk: a = base(o, w = bound * u). `bound` is the trust region: if too small, the inner policy
cannot leave a bad mode of the base; if too large, the noise is out of the base's training
distribution. The base must be deterministic given its noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.moved import attributes
from policies.steering import steered


@dataclass(frozen=True)
class Config(steered.Config):
    """`bound`: largest noise per element (the authors use 1 to 2.5)."""

    bound: float = 1.5


class Dsrl(steered.Steered):
    """DSRL: a base policy whose noise the inner policy chooses; the learner's action is u."""

    def __init__(self, config: Config, spec: Spec) -> None:
        self.bound = config.bound
        super().__init__(config, spec)
        self.chunk = self.base.chunk
        self.noise_shape = self.base.sample_noise(1).shape[1:]

    def inner_spec(self, config: Config, spec: Spec) -> Spec:
        size = math.prod(self.base.sample_noise(1).shape[1:])
        return spec.with_act(Leaf((size,), low=-1.0, high=1.0))

    def initial(self, n: int) -> Tensors:
        u = self.inner.spec.act.zeros(n, next(self.base.parameters()).device)
        return {**super().initial(n), "row/action": u}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.inner.sample_noise(n, explore)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        u = self.inner.act(obs, {}, noise)[0].squeeze(1)
        w = self.bound * u.view(-1, *self.noise_shape)
        actions, carry = self.base_act(obs, carry, w)
        return actions, {**carry, "row/action": u}

    def warmup_policy(self) -> Policy:
        """The base policy with normal noise, clipped to the bound."""
        return self.with_inner({"_target_": "policies.random.Random", "clip": self.bound})


__getattr__ = attributes(__name__)
