"""Smoothed: a policy that acts on noisy observations, so that attacks on them have a bound.

Policy smoothing (Kumar, Levine and Feizi, 2022):

    a_t = pi(o_t + delta_t + sigma n_t),   n_t ~ N(0, I),   sum_t |delta_t|^2 <= radius^2

n is drawn once for each observation that is decided on. The adversary delta sees everything and
has one budget for the whole episode. `embodied.evaluation.certificate` says what no such adversary
can do; averaging the actions of m draws would divide the certified radius by sqrt(m), so one is
drawn. `attack` is an adversary to compare with: `random` directions, or `away` from the action that
the policy would take (gradient steps on |pi(o + delta) - pi(o)|^2). It spends the same in each of
the first `attack_decisions` of an episode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied.core.bounds import Count, NonNegative
from embodied.core.build import ConfigError, Node, build, nearest
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Spec, hidden
from embodied.core.tensors import Tensors, is_history, nest, under

GRADIENT_STEPS = 5  # of the attack `away`


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of policy smoothing; noise and radius are in the observations' own units."""

    base: Node  # node of the wrapped policy
    sigma: NonNegative = 0.1  # std of the noise; 0: none, for an attack on the policy as it is
    names: tuple[str, ...] | None = None  # observations with noise (null: all vectors)
    attack: Literal["none", "random", "away"] = "none"  # adversary
    radius: NonNegative = 0.0  # its budget of an episode
    attack_decisions: Count = 1  # decisions at the start of an episode on which it is spent


class Smoothed(PolicyWrapper):
    """Noise [n, ...] is the base's, then that of the observations, then that of the attack. The
    carry counts the decisions of the episode."""

    for_evaluation = True
    base: Policy

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.config = config
        self.base = build(config.base, Policy, spec=spec)
        self.chunk = self.base.chunk
        known = [name for name, leaf in spec.obs.items() if leaf.dtype == "float32"]
        known = [name for name in known if not hidden(name) and len(spec.obs[name].shape) == 1]
        names = known if config.names is None else config.names
        for name in names:
            if name not in known:
                raise ConfigError(f'policy.names: no vector "{name}"{nearest(name, known)}')
        if not names:
            raise ConfigError("policy=smoothed needs an observation that is a vector")
        if any(is_history(key) for key in self.base.initial(1)):
            raise ConfigError("policy=smoothed: a base with past observations sees them without it")
        if config.attack == "away" and not spec.act.is_continuous:
            raise ConfigError("policy.attack=away needs continuous actions: policy.attack=random")
        if (config.attack == "none") != (config.radius == 0):
            raise ConfigError("policy.attack and policy.radius belong together")
        self.sizes = {name: spec.obs[name].size for name in names}
        self.width = sum(self.sizes.values())

    def noise_std(self) -> float:
        return self.config.sigma

    def initial(self, n: int) -> Tensors:
        begun = torch.zeros(n, dtype=torch.int64, device=self.base.sample_noise(1).device)
        return {"decisions": begun, **nest(self.base.initial(n), "base")}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        own = self.base.sample_noise(n, explore).flatten(1)
        return torch.cat([own, torch.randn(n, 2 * self.width, device=own.device)], 1)

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        inner, shake, push = self._split(noise)
        kept = under(carry, "base")
        left = carry["decisions"] < self.config.attack_decisions
        moved = self.config.sigma * shake + self.attack(obs, kept, inner, push) * left[:, None]
        seen, kept = self.base.observe(self.shifted(obs, moved), kept, inner)
        return seen, {"decisions": carry["decisions"] + 1, **nest(kept, "base")}

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        action, kept = self.base.act(obs, under(carry, "base"), self._split(noise)[0])
        return action, {"decisions": carry["decisions"], **nest(kept, "base")}

    def attack(self, obs: Tensors, carry: Tensors, noise: Tensor, push: Tensor) -> Tensor:
        """The adversary's part [n, width] of one decision, of the norm radius / sqrt(decisions)."""
        if self.config.attack == "none":
            return torch.zeros_like(push)
        size = self.config.radius / math.sqrt(self.config.attack_decisions)
        delta = size * torch.nn.functional.normalize(push, dim=1)
        if self.config.attack == "away":
            usual = self._acted(obs, carry, noise).detach()
            for _ in range(GRADIENT_STEPS):
                delta = size * self._gradient(obs, carry, noise, delta, usual)
        return delta

    def _gradient(
        self, obs: Tensors, carry: Tensors, noise: Tensor, delta: Tensor, usual: Tensor
    ) -> Tensor:
        """The direction [n, width] that changes the action fastest; `delta` where none does."""
        with torch.enable_grad():
            delta = delta.detach().requires_grad_()
            action = self._acted(self.shifted(obs, delta), carry, noise)
            (slope,) = torch.autograd.grad((action - usual).square().sum(), delta)
        still = slope.norm(dim=1, keepdim=True) == 0
        return torch.nn.functional.normalize(
            torch.where(still, delta.detach(), slope), dim=1, eps=1e-30
        )

    def _acted(self, obs: Tensors, carry: Tensors, noise: Tensor) -> Tensor:
        seen, carry = self.base.observe(obs, carry, noise)
        return self.base.act(seen, carry, noise)[0]

    def shifted(self, obs: Tensors, by: Tensor) -> Tensors:
        """The observations with `by` [n, width] added."""
        parts = zip(self.sizes, by.split([*self.sizes.values()], 1), strict=True)
        return {**obs, **{name: obs[name] + part for name, part in parts}}

    def _split(self, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.base.sample_noise(1).shape[1:]
        inner, shake, push = noise.split([math.prod(shape), self.width, self.width], 1)
        return inner.unflatten(1, shape) if shape else inner.squeeze(1), shake, push
