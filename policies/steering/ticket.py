"""Ticket: a frozen generative policy that gets one searched noise vector for a whole episode.

Golden tickets (Patil et al., 2026; arXiv 2603.15757): a constant noise w_k, one of K that were
drawn at random, in place of new noise at every decision: a = base(o, w_k). The authors keep one
vector for all episodes; with `per_context` the first observation o_1 of an episode chooses,

    x = [1, P (f(o_1) - c)],    k = argmax_k  v_k . x + |S_k x| |z_k|,

with f the features of the base's encoder (the numbers observed, where it has none) and z = 0
without exploration. With one vector for all, x = [1]. No network is trained: v, S, P and c are set
by `embodied.learners.finetune.ticket`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.build import ConfigError, Node
from embodied.core.policy import Policy
from embodied.core.spec import Spec, hidden
from embodied.core.tensors import Tensors
from embodied.policies.steering.dsrl import require_steerable
from embodied.policies.steering.steered import Frozen

WIDTH = 32  # most elements of x beside the 1


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a searched noise."""

    base: Node  # node of the policy whose noise is chosen
    candidates: Count = 64  # noise vectors to choose from
    per_context: bool = True  # choose by the first observation of an episode, not one for all


class Ticket(Frozen):
    """Noise [n, K] is z. The carry holds the number of the episode's vector [n] (int64; -1: none
    yet); `row/candidate` is the same, for the learner. A vector for all episodes has to be
    remembered for exploration only."""

    vectors: Tensor
    center: Tensor
    project: Tensor
    value: Tensor
    spread: Tensor

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.chunk = self.base.chunk
        self.per_context = config.per_context
        self.memory = "candidate" if config.per_context else "explore/candidate"
        self.numbers = [
            name
            for name, leaf in sorted(spec.obs.items())
            if not (leaf.is_picture or leaf.is_points or leaf.is_text or hidden(name))
        ]
        size = self.context_size() if config.per_context else 0
        width, count = min(size, WIDTH), config.candidates
        self.register_buffer("vectors", self.base.sample_noise(count, explore=True))
        self.register_buffer("center", torch.zeros(size))
        self.register_buffer("project", torch.zeros(size, width))
        self.register_buffer("value", torch.zeros(count, 1 + width))
        self.register_buffer("spread", torch.eye(1 + width).repeat(count, 1, 1))

    @classmethod
    def wrap(
        cls, base: Policy, node: Mapping[str, Any], inner: Mapping[str, Any] | None = None
    ) -> Self:
        """As in `PolicyWrapper`; ConfigError if the base's actions do not depend on its noise."""
        require_steerable(base)
        return super().wrap(base, node, inner)

    def context_size(self) -> int:
        """Elements of `context`; ConfigError if there are none."""
        numbers = sum(self.spec.obs[name].size for name in self.numbers)
        if not (self.base.feature_size or numbers):
            raise ConfigError(
                f"{type(self.base).__name__} offers no features of its pictures to choose the "
                "noise by: finetune.per_context=false"
            )
        return self.base.feature_size or numbers

    def context(self, obs: Tensors) -> Tensor:
        """f(o), [n, size]."""
        if self.base.feature_size:
            return self.base.features(obs).float()
        return torch.cat([obs[name].flatten(1).float() for name in self.numbers], 1)

    def regressors(self, context: Tensor) -> Tensor:
        """x, [n, 1 + width], of contexts [n, size]."""
        x = (context - self.center) @ self.project
        return torch.cat([torch.ones_like(x[:, :1]), x], 1)

    def initial(self, n: int) -> Tensors:
        none = torch.full((n,), -1, device=self.value.device)
        return {**super().initial(n), self.memory: none, "row/candidate": none}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        z = torch.zeros(n, len(self.vectors), device=self.value.device)
        return z.normal_() if explore else z

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        chosen = carry.get(self.memory)
        if chosen is None:
            chosen = self.choose(obs, noise)
        elif (chosen < 0).any():
            chosen = torch.where(chosen < 0, self.choose(obs, noise), chosen)
        actions, kept = self.base_act(obs, carry, self.vectors[chosen])
        return actions, {**kept, self.memory: chosen, "row/candidate": chosen}

    def choose(self, obs: Tensors, noise: Tensor) -> Tensor:
        """The candidates [n] (int64) of episodes that begin with `obs`."""
        x = torch.ones_like(noise[:, :1])
        if self.per_context:
            x = self.regressors(self.context(obs))
        apart = torch.einsum("kij,nj->nki", self.spread, x).square().sum(2).sqrt()
        return (x @ self.value.T + apart * noise.abs()).argmax(1)
