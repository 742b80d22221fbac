"""Edit: the policy of EXPO; a critic selects among a base policy's chunks and small edits of them.

EXPO (Dong et al., 2025). From the base's candidates a_i and an edit policy u_i ~ pi_e(.|o, a_i),

    a~_i = clip(a_i + scale u_i, -1, 1),   a* = argmax Q(o, .) over a_1 .. a_N, a~_1 .. a~_N

`scale` is the authors' beta. The density of an edit is that of scale u: log pi_e(u) - D log scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Positive
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.policies.gaussian import Gaussian
from embodied.policies.wrappers import best_of_n
from embodied.policies.wrappers.best_of_n import BestOfN, repeat, select_by_q


@dataclass(frozen=True, kw_only=True)
class Config(best_of_n.Config):
    """Settings of edits of candidates."""

    edit: Node  # node of a policy that sees `base_action`, a whole chunk, and acts with the edit
    scale: Positive = 0.1  # largest edit in units of the action range (the authors: 0.05 to 0.7)


class Edit(BestOfN):
    """Noise [n, N * base noise + N * chunk * A]: the base's, then the edit policy's."""

    for_evaluation = False
    edit: Gaussian

    def __init__(self, config: Config, spec: Spec) -> None:
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
