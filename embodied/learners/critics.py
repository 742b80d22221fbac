"""Critic: Q-values of an ensemble, from observations that the policy may not see."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from embodied.core.build import ConfigError, nearest
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.nn.ensemble import Ensemble
from policies.networks.encoders import Encoder


class Critic(nn.Module):
    """An encoder and `n` networks; Q-values [n, N] of observations and actions [N, size], or where
    each network answers with `out` > 1 numbers (a distribution of returns) these, [n, N, out].

    The encoder takes every observation, `critic/*` and `privileged/*` too, or only those named in
    `obs`; a name that the world does not have is a ConfigError.
    """

    def __init__(
        self,
        spec: Spec,
        size: int,
        n: int,
        hidden: Sequence[int],
        *,
        layer_norm: bool = False,
        activation: str = "relu",
        obs: Sequence[str] | None = None,
        out: int = 1,
    ) -> None:
        super().__init__()
        seen = spec.obs if obs is None else {name: _leaf(spec, name) for name in obs}
        self.encoder = Encoder(seen, asymmetric=True)
        self.out = out
        self.ensemble = Ensemble(n, self.encoder.size + size, hidden, out, layer_norm, activation)

    def forward(self, obs: Tensors, action: Tensor, first: int | None = None) -> Tensor:
        """Of all networks, or of the `first` few."""
        answer = self.ensemble(torch.cat([self.encoder(obs), action], 1), first)
        return answer.squeeze(-1) if self.out == 1 else answer

    def each(self, obs: Tensors, actions: Tensor, members: Tensor | None = None) -> Tensor:
        """Q-values [n, N, K] of K actions for every observation, `actions` [N, K, size]; an
        observation is encoded once. `members` [m] (int64): only of these networks, [m, N, K]."""
        count = actions.shape[1]
        features = self.encoder(obs).unsqueeze(1).expand(-1, count, -1)
        x = torch.cat([features, actions], 2).flatten(0, 1)
        if members is None:
            answer = self.ensemble(x)
        else:
            drawn = {k: w.index_select(0, members) for k, w in self.ensemble.named_parameters()}
            answer = functional_call(self.ensemble, drawn, (x, len(members)))
        answer = answer.squeeze(-1) if self.out == 1 else answer
        return answer.unflatten(1, (-1, count))


def critic_loss(q: Tensor, backup: Tensor, weight: Tensor | None = None) -> Tensor:
    """Sum over critics of the mean squared error; `q` [E, N], `backup` and `weight` [N]."""
    error = (q - backup).square()
    return (error if weight is None else error * weight).mean(1).sum()


def _leaf(spec: Spec, name: str) -> Leaf:
    if name not in spec.obs:
        raise ConfigError(f'critic_obs: there is no observation "{name}"{nearest(name, spec.obs)}')
    return spec.obs[name]
