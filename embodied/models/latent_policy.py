"""LatentPolicy: a policy of a model's latents as a policy of what the model was fitted to; recorded
episodes in these latents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import ConfigError, Node, build
from embodied.core.device import device_of
from embodied.core.policy import Policy
from embodied.core.spec import Spec, require_same
from embodied.core.tensors import HISTORY, Tensors, history_steps, is_history, nest, under
from embodied.datasets.lerobot.pictures import load
from embodied.datasets.lerobot.reader import Episodes
from embodied.models.dynamics import LATENT, LatentDynamics
from embodied.models.dynamics import load as load_model
from embodied.policies.generative.chunk_sampler import empty_history


def load_latent(folder: Path | str) -> LatentDynamics:
    """The latent model in `folder`; ConfigError for one without latents."""
    model = load_model(folder)
    if not isinstance(model, LatentDynamics):
        raise ConfigError(
            f"the model {folder} has no latents; fit one that has: "
            "embodied model train model=recurrent demos=DIR out=DIR"
        )
    return model


@torch.no_grad()
def encoded(model: LatentDynamics, episodes: Episodes, where: str) -> Episodes:
    """`episodes`, of the dataset `where`, with the observation `latent` in place of all others.

    Each is filtered from its first observation on. SpecMismatch if they are not of the model's
    environment.
    """
    require_same(model.data_spec, episodes.spec, "the model", f"dataset {where}")
    device = device_of(model)
    size = model.spec.obs[LATENT].size
    count, total = len(episodes), int(episodes.length.sum())
    steps, final = torch.zeros(total, size), torch.zeros(count, size)
    frames = {
        name: torch.cat([episodes.steps[f"obs/{name}"], episodes.final[name]])
        for name in model.names
    }
    action = model.choices.one_hot(episodes.steps["action"].to(device))
    latent = torch.zeros(count, size, device=device)
    for t in range(int(episodes.length.max()) + 1):
        here = (episodes.length >= t).nonzero().flatten()
        at = episodes.start[here] + t
        last = episodes.length[here] == t
        rows = torch.where(last, total + here, at)
        obs = tt.to(load(tt.take(frames, rows)), device)
        done = action[at - 1] if t else torch.zeros_like(action[at.clamp(max=total - 1)])
        filtered = model.filtered(latent[here.to(device)], done, obs)
        latent[here.to(device)] = filtered
        now = filtered.cpu()
        steps[at[~last]] = now[~last]
        final[here[last]] = now[last]
    others = {key: value for key, value in episodes.steps.items() if not key.startswith("obs/")}
    return replace(
        episodes,
        spec=replace(model.spec, text=episodes.spec.text, tasks=episodes.spec.tasks),
        steps={**others, f"obs/{LATENT}": steps},
        final={LATENT: final},
    )


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
        device = device_of(self.model)
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
        if self.chunk > 1:
            carry |= empty_history(self.spec, self.model.names, self.chunk - 1, n, device)
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
