"""ReLIC: in-context reinforcement learning over long contexts (Elawady et al., 2024).

PPO for a transformer over lifetimes (`Trials`) that is updated often within one long context. A
rollout is `chunks` batches of `horizon` decisions. After each, PPO learns from the newest batch
alone, which attends to all batches before it; their keys and values are computed anew with the
parameters of now, and so are those with which the policy acts on. After the last one it learns from
the whole rollout at once. `policy.sink=true` gives each head one learned key and value, without
which long contexts destabilise training.

The critic is an MLP on the transformer's output, V(h). Where a lifetime reaches a time limit, its
value is bootstrapped from the last observation that was acted on. Differences from the published
code: a bias by age in place of rotary embeddings; the order of finished episodes is kept; no layer
is dropped out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each, nest, under
from embodied.learners.learner import UNPLANNED, RunPlan
from embodied.learners.on_policy import ppo
from embodied.learners.on_policy.ppo import Before, Ppo, SharedValue
from embodied.policies.recurrent import evaluate_inner

USED = ("obs/", "next_obs/")  # of a batch, besides the columns of `COLUMNS`
COLUMNS = ("action", "reward", "discount", "ended", "first", "valid")


@dataclass(frozen=True)
class Config(ppo.Config):
    """Settings of ReLIC, besides those of PPO."""

    chunks: Count = 8  # batches of a rollout, after which PPO learns from all of it


class Relic(Ppo):
    """PPO with partial updates. `rollout` has the batches since the last whole update, `begun` the
    cache before them."""

    usual_policy = "transformer"

    def __init__(
        self, config: Config, policy: Policy, spec: Spec, run: RunPlan = UNPLANNED
    ) -> None:
        if not callable(getattr(policy, "along", None)):
            raise ConfigError("learner=relic needs a transformer: policy=transformer")
        if config.value.obs is not None:
            raise ConfigError("value.obs has no effect with learner=relic: leave it out")
        super().__init__(config, policy, spec, run)
        self.chunks = config.chunks
        self.rollout: list[Tensors] = []
        self.begun: Tensors = {}

    def _critic(self, spec: Spec) -> SharedValue:
        return SharedValue(self.config.value, self.policy)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        if not self.rollout:
            self.begun = each(under(batch, "carry"), torch.clone)
        kept = {k: v for k, v in batch.items() if k in COLUMNS or k.startswith(USED)}
        metrics = super().update({**kept, **nest(self.context(), "carry")})
        self.rollout.append(each(kept, torch.clone))
        if len(self.rollout) == self.chunks:
            if self.chunks > 1:
                whole = {key: torch.cat([part[key] for part in self.rollout]) for key in kept}
                metrics = super().update({**whole, **nest(self.begun, "carry")})
                self.done -= whole["valid"].numel()  # decisions are counted once, for schedules
            self.begun, self.rollout = self.context(), []
        return metrics

    @torch.no_grad()
    def context(self) -> Tensors:
        """The cache [B, ...] after all batches of the rollout, by the parameters of now."""
        carry = self.begun
        for part in self.rollout:
            _, carry = self.policy.along(under(part, "obs"), carry, part["first"])
        return carry

    def refreshed(self, carry: Tensors) -> Tensors:
        return {**carry, **(self.context() if self.rollout else self.begun)}

    def _evaluate_recurrent(self, batch: Tensors, carry: Tensors) -> Before:
        obs, following = under(batch, "obs"), under(batch, "next_obs")
        memory, after = self.policy.along(obs, carry, batch["first"])
        old, _ = evaluate_inner(self.policy.inner, memory, obs, batch["action"])
        value = self.value(memory)
        last = each(following, lambda leaf: leaf[-1:])
        ahead, _ = self.policy.along(last, after, torch.zeros_like(batch["first"][-1:]))
        bootstrap = torch.cat([value[1:], self.value(ahead)])
        bootstrap = torch.where(batch["ended"], value, bootstrap)
        return old, value, bootstrap, nest(carry, "carry")

    def _evaluate_minibatch(self, minibatch: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        obs = each(under(minibatch, "obs"), lambda leaf: leaf.transpose(0, 1))
        memory, _ = self.policy.along(obs, under(minibatch, "carry"), minibatch["first"].mT)
        action = minibatch["action"].transpose(0, 1)
        log_prob, entropy = evaluate_inner(self.policy.inner, memory, obs, action)
        return log_prob.mT, entropy.mT, self.value(memory).mT

    def state_values(self, obs: Tensors) -> Tensor:
        leaf = next(iter(obs.values()))
        first = torch.ones(1, len(leaf), dtype=torch.bool, device=leaf.device)
        carry = self.policy.initial(len(leaf))
        return self.value(self.policy.along(each(obs, lambda x: x[None]), carry, first)[0])[0]

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"rollout": self.rollout, "begun": self.begun}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.rollout, self.begun = list(state["rollout"]), state["begun"]
