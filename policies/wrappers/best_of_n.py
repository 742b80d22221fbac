"""BestOfN: selects the sample with the highest Q among N samples of a base policy.

IDQL (Hansen-Estruch et al., 2023); Q-chunking (2025).

    a* = argmax_{i <= N} Q(o, base(o, z_i)),   z_1 .. z_N independent samples

The critic is part of the policy, so a checkpoint contains it.

Edit: the policy of EXPO; a critic selects among a base policy's chunks and small edits of them.

EXPO (Dong et al., 2025). From the base's candidates a_i and an edit policy u_i ~ pi_e(.|o, a_i),

    a~_i = clip(a_i + scale u_i, -1, 1),   a* = argmax Q(o, .) over a_1 .. a_N, a~_1 .. a~_N

`scale` is the authors' beta. The density of an edit is that of scale u: log pi_e(u) - D log scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from embodied.core.bounds import Count, Positive
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Leaf, Spec, hidden
from embodied.core.tensors import Tensors, each, take
from embodied.nn.networks import QFunction
from embodied.policies.encoded import build_with_chunk, require_continuous
from embodied.policies.gaussian import Gaussian

Judge = Callable[[Tensors, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class BestOfNConfig:
    """Settings of the choice among candidates."""

    base: Node  # node of the wrapped policy
    critic: Node  # node of a QFunction
    n: Count = 8  # candidates per decision
    chunk: Count | None = None  # actions of one decision (null: the base's)


class BestOfN(PolicyWrapper):
    """Noise [n, N * base noise]: the base's inference noise, then its exploration noise."""

    requires_critic = True
    for_evaluation = True
    base: Policy
    critic: Any  # a module with `each` and an `encoder`

    def __init__(self, config: BestOfNConfig, spec: Spec) -> None:
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


@dataclass(frozen=True, kw_only=True)
class EditConfig(BestOfNConfig):
    """Settings of edits of candidates."""

    edit: Node  # node of a policy that sees `base_action`, a whole chunk, and acts with the edit
    scale: Positive = 0.1  # largest edit in units of the action range (the authors: 0.05 to 0.7)


class Edit(BestOfN):
    """Noise [n, N * base noise + N * chunk * A]: the base's, then the edit policy's."""

    for_evaluation = False
    edit: Gaussian

    def __init__(self, config: EditConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        self.scale = config.scale
        act = Leaf((self.size,), low=-1.0, high=1.0)
        edit = build(config.edit, Policy, spec=spec.with_obs(base_action=act).with_act(act))
        if not isinstance(edit, Gaussian) or edit.chunk != 1:
            raise ConfigError(
                "edit needs a policy with a density and chunk=1: embodied.policies.gaussian"
            )
        self.edit = edit

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        edits = self.edit.sample_noise(n * self.n, explore).view(n, -1)
        return torch.cat([super().sample_noise(n, explore), edits], 1)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        base, edits = self._split(noise)
        chunks, carry = self.candidates(obs, carry, base)
        both = self._with_edits(obs, chunks.flatten(1), edits)
        chosen, index = select_by_q(self.judge, obs, both)
        rows = torch.arange(noise.shape[0], device=index.device) * self.n + index % self.n
        chosen = chosen.view(-1, self.chunk, *self.spec.act.shape)
        return chosen, {key: leaf.index_select(0, rows) for key, leaf in carry.items()}

    def proposals(self, obs: Tensors, noise: Tensor) -> Tensor:
        """The base's candidates, then their edited versions, [n, 2 N, size]."""
        base, edits = self._split(noise)
        return self._with_edits(obs, super().proposals(obs, base).flatten(0, 1), edits)

    def _with_edits(self, obs: Tensors, actions: Tensor, noise: Tensor) -> Tensor:
        seen = {**repeat(obs, self.n), "base_action": actions}
        u = self.edit.act(seen, {}, noise.reshape(-1, self.size))[0].flatten(1)
        edited = (actions + self.scale * u).clamp(-1, 1)
        both = [part.unflatten(0, (-1, self.n)) for part in (actions, edited)]
        return torch.cat(both, 1)

    def revise(self, obs: Tensors, action: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The edited `action` [n, size], clipped to [-1, 1], and the edit's log-density [n]."""
        u, log_prob = self.edit.sample({**obs, "base_action": action}, noise)
        edited = (action + self.scale * u).clamp(-1, 1)
        return edited, log_prob - self.size * math.log(self.scale)

    def _split(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        at = noise.shape[1] - self.n * self.size
        return noise[:, :at], noise[:, at:]

    def fit(self, rows: Tensors) -> None:
        super().fit(rows)
        self.edit.fit({**rows, "obs/base_action": rows["action"].reshape(-1, self.size)})
