"""LatentPolicy: a policy of a model's latents as a policy of what the model was fitted to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import FRESH, HISTORY, Tensors, history_steps, is_history, nest, under
from embodied.models.dynamics import LATENT, LatentDynamics

LAST, PLAN = "last_latent", "last_plan"


@dataclass(frozen=True)
class Config:
    """Settings of a policy of latents."""

    base: Node  # node of the policy of latents
    model: Node  # node of the model that filters them


class LatentPolicy(Policy):
    """At a decision the model filters the latent from every observation since the decision before,
    and from the actions that were executed between them; `base` decides from it.

    The carry has the latent and the plan of the last decision, and the observations between.
    """

    base: Policy
    model: LatentDynamics

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.model = build(config.model, LatentDynamics, spec=spec)
        self.base = build(config.base, Policy, spec=self.model.spec)
        if history_steps(self.base.initial(1)):
            raise ConfigError("a policy of latents needs no past observations: policy.obs_steps=1")
        self.chunk, self.noise_steps = self.base.chunk, self.base.noise_steps

    @classmethod
    def of(cls, base: Policy, model: LatentDynamics) -> Self:
        """The trained `base` and `model`, whose parameters are shared."""
        node: dict[str, Any] = {
            "_target_": f"{cls.__module__}.{cls.__qualname__}",
            "base": base.node,
            "model": model.node,
        }
        policy = build(node, cls, spec=model.data_spec)
        policy.base, policy.model = base, model
        return policy.train(base.training)

    @property
    def latent_policy(self) -> Policy:
        """The policy as it acts in the model itself."""
        return self.base

    def initial(self, n: int) -> Tensors:
        device = next(self.model.parameters()).device
        latent = torch.zeros(n, self.model.spec.obs[LATENT].size, device=device)
        plan = self.spec.act.zeros(n, device)[:, None].repeat(
            1, self.chunk, *[1] * len(self.spec.act.shape)
        )
        carry = {
            **nest(self.base.initial(n), "base"),
            LAST: latent,
            PLAN: plan,
            "executed_steps": torch.zeros(n, dtype=torch.int64, device=device),
        }
        if self.chunk == 1:
            return carry
        carry[FRESH] = torch.ones(n, dtype=torch.bool, device=device)
        for name in self.model.names:
            leaf = self.spec.obs[name]
            zeros = leaf.zeros(n, device)[:, None]
            carry[HISTORY + name] = zeros.repeat(1, self.chunk - 1, *[1] * len(leaf.shape))
        return carry

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.base.sample_noise(n, explore)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        latent = self.latent(obs, carry)
        seen, kept = self.base.observe({LATENT: latent}, under(carry, "base"), noise)
        actions, kept = self.base.act(seen, kept, noise)
        past = {key: value for key, value in carry.items() if is_history(key)}
        own = {LAST: latent, PLAN: actions, "executed_steps": carry["executed_steps"]}
        return actions, {**past, **nest(kept, "base"), **own}

    @torch.no_grad()
    def latent(self, obs: Tensors, carry: Tensors) -> Tensor:
        """The latent [n, D] at `obs` [n, ...]. With k steps executed since the last decision, the
        observations after the first k - 1 of them are the newest ones in the carry."""
        executed, latent = carry["executed_steps"], carry[LAST]
        n = len(latent)
        here = {name: obs[name] for name in self.model.names}
        before = torch.zeros(n, self.model.choices.width, device=latent.device)
        first = self.model.filtered(torch.zeros_like(latent), before, here)
        rows = torch.arange(n, device=latent.device)
        for step in range(1, self.chunk + 1):
            now = executed == step
            seen = here
            if step < self.chunk:  # of longer runs, the observation between
                place = (self.chunk - 1 - executed + step).clamp(0, self.chunk - 2)
                seen = {
                    name: torch.where(
                        now.view(-1, *[1] * (value.ndim - 1)),
                        value,
                        carry[HISTORY + name][rows, place].to(value.dtype),
                    )
                    for name, value in here.items()
                }
            action = self.model.choices.one_hot(carry[PLAN][:, step - 1])
            following = self.model.filtered(latent, action, seen)
            latent = torch.where((executed >= step)[:, None], following, latent)
        return torch.where((executed == 0)[:, None], first, latent)
