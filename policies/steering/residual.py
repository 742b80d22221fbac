"""Residual: residual RL, per-step corrections of a frozen base policy with action chunks.

Residual reinforcement learning (Johannink et al., 2019); ResiP on chunked imitation policies
(Ankile et al., 2024). At every control step a = clip(a_base + scale * u), with u from the inner
policy, whose observations include the base's action of this step. The base's chunk is executed open
loop for `execute` steps before it plans again; the correction is closed loop. Of ResiP's code, the
distillation into a policy of images is not here.

An action a of somebody else (demonstrations) is u = clip((a - a_base) / scale), and what is beyond
the largest correction is taken for the base's: (a - scale * u, u) makes exactly a.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import CountOrZero, Positive
from embodied.core.build import ConfigError
from embodied.core.device import device_of
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, length, where
from embodied.policies.abilities import HasGaussian
from embodied.policies.encoded import require_continuous
from embodied.policies.steering import steered
from embodied.policies.steering.steered import Steered


@dataclass(frozen=True)
class Config(steered.Config):
    """Settings of a residual policy."""

    scale: Positive = 0.1  # largest correction in units of the action range
    execute: CountOrZero = 0  # executed actions of the chunk (0: the whole chunk)
    dims: tuple[CountOrZero, ...] | None = None  # action elements that are corrected (null: all)


class Residual(Steered):
    """Residual policy. The carry holds the base's plan and cursor; the learner's action is u."""

    chunk = 1
    squashed = False
    picked: Tensor | None
    """[D, A]: one where an element of the correction is one of the action (None: all, in order)."""

    def __init__(self, config: Config, spec: Spec) -> None:
        require_continuous(spec)
        super().__init__(config, spec)
        self.scale = config.scale
        picked = None if config.dims is None else torch.eye(spec.act.size)[list(config.dims)]
        self.register_buffer("picked", picked, persistent=False)
        self.execute = config.execute or self.base.chunk
        self.inner_noise = self.inner.sample_noise(1).flatten(1).shape[1]
        self.base_noise = self.base.sample_noise(1).shape[1:]

    def inner_spec(self, config: Config, spec: Spec) -> Spec:
        size, dims = spec.act.size, config.dims
        if dims is not None and (not dims or len({*dims} & {*range(size)}) < len(dims)):
            raise ConfigError(
                f"finetune.dims={list(dims)} should be numbers of action elements, each once, from "
                f"0 to {size - 1}"
            )
        act = Leaf((size if dims is None else len(dims),), low=-1.0, high=1.0)
        return spec.with_obs(base_action=Leaf((size,), low=-1.0, high=1.0)).with_act(act)

    def initial(self, n: int) -> Tensors:
        device = device_of(self)
        size = self.spec.act.size
        return {
            **super().initial(n),
            "plan": torch.zeros(n, self.base.chunk, size, device=device),
            "cursor": torch.full((n,), self.execute, device=device),
            "row/action": self.inner.spec.act.zeros(n, device),
            **self.inner.initial(n),
        }

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        """[n, inner + base]: the inner policy's noise, then the base's (used when it plans)."""
        inner = self.inner.sample_noise(n, explore).flatten(1)
        return torch.cat([inner, self.base.sample_noise(n, explore).flatten(1)], 1)

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        done = carry["cursor"] >= self.execute
        if done.any():
            w = noise[:, self.inner_noise :].view(-1, *self.base_noise)
            plan, kept = self.base_act(obs, carry, w)
            planned = {**kept, "plan": plan, "cursor": torch.zeros_like(carry["cursor"])}
            carry = {**carry, **where(done, planned, {key: carry[key] for key in planned})}
        rows = torch.arange(len(done), device=done.device)
        return {**obs, "base_action": carry["plan"][rows, carry["cursor"]]}, carry

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        u, kept = self.inner.act(obs, {}, noise[:, : self.inner_noise])
        action = (obs["base_action"] + self.correction(u.squeeze(1))).clamp(-1, 1)
        # The inner policy's stored action (before clipping), or its executed action.
        kept = {"row/action": u.squeeze(1), **kept}
        return action[:, None], {**carry, "cursor": carry["cursor"] + 1, **kept}

    def correction(self, u: Tensor) -> Tensor:
        """What the inner policy's actions `u` [n, D] add to the base's, [n, A]."""
        return self.scale * u if self.picked is None else (self.scale * u) @ self.picked.to(u)

    def gaussian(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """See `policies.abilities.HasGaussian`: around the base's action without noise. ConfigError
        if the base plans chunks, or the correction has other elements than the action."""
        inner = self.inner
        differs = self.base.chunk > 1 or self.picked is not None
        if not isinstance(inner, HasGaussian) or inner.squashed or differs:
            raise ConfigError(
                "only a residual by policy=diagonal_gaussian of all elements, on a base without "
                "action chunks, is a Gaussian of its own"
            )
        n = length(obs)
        seen, _ = self.observe(obs, self.initial(n), torch.zeros_like(self.sample_noise(n)))
        mean, log_std = inner.gaussian(seen)
        mean = (seen["base_action"] + self.correction(mean.clamp(-1, 1))).clamp(-1, 1)
        return mean, log_std + math.log(self.scale)

    def described(self, base_action: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """See `policies.abilities.Corrects`."""
        u = (action - base_action) / self.scale
        u = (u if self.picked is None else u @ self.picked.T.to(u)).clamp(-1, 1)
        return action - self.correction(u), u
