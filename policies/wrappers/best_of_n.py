"""BestOfN: selects the sample with the highest Q among N samples of a base policy.

IDQL (Hansen-Estruch et al., 2023); Q-chunking (2025).

    a* = argmax_{i <= N} Q(o, base(o, z_i)),   z_1 .. z_N independent samples

The critic is part of the policy, so a checkpoint contains it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from embodied.core.bounds import Chunk, Count
from embodied.core.build import Node, build
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Spec, hidden
from embodied.core.tensors import Tensors, each, take
from embodied.nn.networks import QFunction
from embodied.policies.encoded import build_with_chunk, require_continuous

Judge = Callable[[Tensors, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the choice among candidates."""

    base: Node  # node of the wrapped policy
    critic: Node  # node of a QFunction
    n: Count = 8  # candidates per decision
    chunk: Chunk | None = None  # actions of one decision (null: the base's)


class BestOfN(PolicyWrapper):
    """Noise [n, N * base noise]: the base's inference noise, then its exploration noise."""

    requires_critic = True
    for_evaluation = True
    base: Policy
    critic: Any  # a module with `each` and an `encoder`

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        require_continuous(spec)
        self.spec = spec
        self.n = config.n
        self.base = build_with_chunk(config.base, config.chunk, spec)
        self.chunk = self.base.chunk
        self.size = self.chunk * spec.act.size
        self.noise_shape = self.base.sample_noise(1).shape[1:]
        # Policy and critic act on the robot, so they use no critic-only observations.
        seen = {name: leaf for name, leaf in spec.obs.items() if not hidden(name)}
        self.critic = build(config.critic, QFunction, spec=replace(spec, obs=seen), size=self.size)
        self.fresh = True

    @classmethod
    def wrap(
        cls,
        base: Policy,
        node: Mapping[str, Any],
        inner: Mapping[str, Any] | None = None,
        critic: Any = None,
    ) -> Self:
        """Build `node` around a trained `base`, which keeps its normalisers.

        `critic`: one that a learner trained with `base` (None: a new one). It evaluates the actions
        that it was trained on: the base's stored action, or the first steps of its chunk.
        """
        best = super().wrap(base, node, inner)
        best.fresh = False
        if critic is not None:
            best.critic = critic
            best.size = critic.ensemble.weights[0].shape[1] - critic.encoder.size
        return best

    def initial(self, n: int) -> Tensors:
        return self.base.initial(n)

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        first = self.base.sample_noise(n, explore).view(n, -1)
        others = self.base.sample_noise(n * (self.n - 1), explore=True).view(n, -1)
        return torch.cat([first, others], 1)

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        first = noise[:, : math.prod(self.noise_shape)]
        return self.base.observe(obs, carry, first.reshape(-1, *self.noise_shape))

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        actions, carry = self.candidates(obs, carry, noise)
        judged = carry.get("row/action", actions.flatten(1)[:, : self.size])
        _, index = select_by_q(self.judge, obs, judged.unflatten(0, (-1, self.n)))
        rows = torch.arange(noise.shape[0], device=index.device) * self.n + index
        return actions.index_select(0, rows), take(carry, rows)

    def candidates(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        """Chunks [n * N, H, A] of the base for noise [n, N * d], and its carries."""
        return self.base.act(
            repeat(obs, self.n), repeat(carry, self.n), noise.reshape(-1, *self.noise_shape)
        )

    def proposals(self, obs: Tensors, noise: Tensor) -> Tensor:
        """The candidates as stored actions, [n, N, size]."""
        chunks, _ = self.candidates(obs, self.base.initial(noise.shape[0]), noise)
        return chunks.flatten(1).unflatten(0, (-1, self.n))

    def judge(self, obs: Tensors, candidates: Tensor) -> Tensor:
        """Q-values [n, N], the mean of the critic's networks."""
        return self.critic.each(obs, candidates).mean(0)

    def loss(self, batch: Tensors) -> Tensor:
        return self.base.loss(batch)

    def warmup_policy(self) -> Policy:
        return self.base.warmup_policy()

    def fit(self, rows: Tensors) -> None:
        """Set the normalisers; a pretrained base keeps its own."""
        if self.fresh:
            self.base.fit(rows)
        self.critic.encoder.fit(rows)


def select_by_q(judge: Judge, obs: Tensors, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """The candidate with the highest value per sample, [n, D], and its index [n] (int64).

    `judge(obs, candidates)` returns values [n, N] of `candidates` [n, N, D].
    """
    index = judge(obs, candidates).argmax(1)
    wide = index.view(-1, 1, 1).expand(-1, 1, candidates.shape[2])
    return candidates.gather(1, wide).squeeze(1), index


def repeat(rows: Tensors, times: int) -> Tensors:
    """Repeat each sample `times` times, consecutively: [n, ...] to [n * times, ...]."""
    # Not repeat_interleave: it cannot be exported with a dynamic batch size.
    return each(
        rows, lambda leaf: leaf.unsqueeze(1).expand(-1, times, *leaf.shape[1:]).flatten(0, 1)
    )
