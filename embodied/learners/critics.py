"""Critics: ensembles of action-value functions Q(s, a), and state-value functions V(s).

Critics may use observations that the policy does not have (`critic/*`, `privileged/*`). A critic's
output may be a categorical distribution of returns (C51; Bellemare, Dabney and Munos, 2017). The
Bellman backup moves every atom, z -> r + d z, clips it to the support and splits its probability
between the two neighbouring atoms, which preserves the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from embodied.core.bounds import Few, NonNegative, Units
from embodied.core.build import ConfigError, nearest, resolve
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each
from embodied.nn.networks import Ensemble, QFunction, mlp, orthogonal
from embodied.policies.networks.encoders import Encoder


class Critic(QFunction):
    """Q-function: an encoder of all observations, or of `obs`, and an ensemble of `n` MLPs.
    Returns Q-values [n, N] for observations [N, ...] and actions [N, size]; with `out` > 1 (a
    distribution of returns) [n, N, out]."""

    def __init__(
        self,
        spec: Spec,
        size: int,
        n: int,
        hidden: Sequence[int],
        layer_norm: bool = False,
        activation: str = "relu",
        obs: Sequence[str] | None = None,
        out: int = 1,
        extractor: str | None = None,
    ) -> None:
        super().__init__()
        self.encoder = _encoder(spec, obs, "critic_obs", extractor)
        self.out = out
        self.ensemble = Ensemble(n, self.encoder.size + size, hidden, out, layer_norm, activation)

    def forward(self, obs: Tensors, action: Tensor, first: int | None = None) -> Tensor:
        """Q-values of all networks, or of only the first `first` ones."""
        q = self.ensemble(torch.cat([self.encoder(obs), action], 1), first)
        return q.squeeze(-1) if self.out == 1 else q

    def each(self, obs: Tensors, actions: Tensor, members: Tensor | None = None) -> Tensor:
        """Q-values [n, N, K] of K actions per observation, `actions` [N, K, size]. Each observation
        is encoded once. `members` [m] (int64): use only these networks, [m, N, K]."""
        count = actions.shape[1]
        features = self.encoder(obs).unsqueeze(1).expand(-1, count, -1)
        x = torch.cat([features, actions], 2).flatten(0, 1)
        if members is None:
            q = self.ensemble(x)
        else:
            chosen = {k: w.index_select(0, members) for k, w in self.ensemble.named_parameters()}
            q = functional_call(self.ensemble, chosen, (x, len(members)))
        q = q.squeeze(-1) if self.out == 1 else q
        return q.unflatten(1, (-1, count))


def watch_active_units(learner: nn.Module) -> None:
    """Let the ensembles in `learner.critic` measure the share of their hidden units above 0, which
    falls while a critic loses the ability to fit new targets (Ma et al., 2024)."""
    critic = getattr(learner, "critic", None)
    for part in critic.modules() if isinstance(critic, nn.Module) else ():
        if isinstance(part, Ensemble):
            part.watch()


@dataclass(frozen=True)
class CriticConfig:
    """An ensemble of critics, each an MLP."""

    critics: Few = 2  # number of critics
    hidden: tuple[Units, ...] = (256, 256)  # units of the critics' hidden layers
    layer_norm: bool = False  # layer normalisation in the critics


def ensemble(
    config: Any,
    spec: Spec,
    size: int,
    activation: str = "relu",
    out: int = 1,
    n: int | None = None,
    obs: Sequence[str] | None = None,
    extractor: str | None = None,
) -> Critic:
    """`n` critics (None: `config.critics`) with the layers of `config`, for actions of `size`
    numbers; they use the observations `obs` (None: all), encoded by the class `extractor`, and
    return `out` numbers each."""
    count = config.critics if n is None else n
    norm = config.layer_norm
    return Critic(spec, size, count, config.hidden, norm, activation, obs, out, extractor)


def critic_loss(q: Tensor, backup: Tensor, weight: Tensor | None = None) -> Tensor:
    """Sum over critics of the mean squared error; `q` [E, N], `backup` and `weight` [N]."""
    error = (q - backup).square()
    return (error if weight is None else error * weight).mean(1).sum()


@dataclass(frozen=True)
class ValueConfig:
    hidden: tuple[Units, ...] = (64, 64)  # units of the hidden layers
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "tanh"  # of the hidden layers
    layer_norm: bool = False  # layer normalisation in the hidden layers
    head: NonNegative = 1.0  # gain of the last layer's orthogonal initialisation
    obs: tuple[str, ...] | None = None  # observations that it uses; null: all, also critic/*


class Value(nn.Module):
    """State-value function: an encoder and an MLP; returns V [N] for observations [N, ...]."""

    encoder: Encoder

    def __init__(self, config: ValueConfig, spec: Spec) -> None:
        super().__init__()
        self.encoder = _encoder(spec, config.obs, "value.obs")
        self.net = mlp(self.encoder.size, config.hidden, 1, config.activation, config.layer_norm)
        orthogonal(self.net, config.head)

    def forward(self, obs: Tensors) -> Tensor:
        return self.net(self.encoder(obs)).squeeze(1)


class RecurrentValue(nn.Module):
    """State-value function with its own GRU, for recurrent policies; V [T, B] of sequences."""

    def __init__(self, config: ValueConfig, spec: Spec, width: int) -> None:
        super().__init__()
        from embodied.policies.recurrent import Memory

        self.memory = Memory(_encoder(spec, config.obs, "value.obs"), width)
        self.net = mlp(width, config.hidden, 1, config.activation, config.layer_norm)
        orthogonal(self.net, config.head)

    @property
    def encoder(self) -> Encoder:
        return self.memory.encoder

    def forward(self, obs: Tensors, h: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Values [T, B] and hidden states [T, B, width]; `h` [B, width] is the initial one."""
        memory = self.memory.along(obs, h, first)
        return self.net(memory.flatten(0, 1)).view(first.shape), memory

    def after(self, obs: Tensors, memory: Tensor) -> Tensor:
        """Values [T, B] of observations [T, B, ...], each after a hidden state [T, B, width]."""
        flat = each(obs, lambda value: value.flatten(0, 1))
        return self.net(self.memory(flat, memory.flatten(0, 1))).view(memory.shape[:2])


def _encoder(
    spec: Spec, obs: Sequence[str] | None, setting: str, extractor: str | None = None
) -> Encoder:
    """An encoder (of the class `extractor`) of the observations `obs` (None: all). ConfigError for
    a name that the environment does not have; `setting` is the setting's name, for the message."""
    for name in spec.obs if obs is None else obs:
        if name not in spec.obs:
            raise ConfigError(f'{setting}: no observation "{name}"{nearest(name, spec.obs)}')
    leaves = spec.obs if obs is None else {name: spec.obs[name] for name in obs}
    kind = Encoder if extractor is None else resolve(extractor, Encoder)
    return kind(leaves, asymmetric=True)


def support_of(config: Any) -> Support | None:
    """The `atoms` of `config` from the least to the largest of its `values`; None without atoms."""
    if not config.atoms and config.values != type(config).values:
        raise ConfigError("learner.values has no effect without learner.atoms=101: leave it out")
    low, high = config.values
    return Support(low, high, config.atoms) if config.atoms else None


@dataclass(frozen=True)
class Support:
    """`count` atoms, evenly spaced from `low` to `high`."""

    low: float = -10.0
    high: float = 10.0
    count: int = 101

    def __post_init__(self) -> None:
        if self.count < 2 or not self.low < self.high:
            raise ConfigError(f"a support needs low < high and at least 2 atoms, got {self}")

    def atoms(self, device: torch.device | str = "cpu") -> Tensor:
        """The values [K] of the atoms."""
        return torch.linspace(self.low, self.high, self.count, device=device)

    def mean(self, logits: Tensor) -> Tensor:
        """Expected values [...] of the distributions with logits [..., K]."""
        return logits.softmax(-1) @ self.atoms(logits.device)

    def project(self, probabilities: Tensor, values: Tensor) -> Tensor:
        """Project a distribution with `probabilities` [N, M] at `values` [N, M] onto the atoms,
        [N, K]."""
        width = (self.high - self.low) / (self.count - 1)
        place = (values.clamp(self.low, self.high) - self.low) / width
        below = place.floor().clamp(0, self.count - 2)
        share = place - below
        index = below.long()
        shared = values.new_zeros(values.shape[0], self.count)
        shared.scatter_add_(1, index, probabilities * (1 - share))
        return shared.scatter_add_(1, index + 1, probabilities * share)

    def back_up(self, logits: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """The projected distribution [N, K] of r + d z, where z has the `logits` [N, K]; `reward`,
        `discount` [N]."""
        moved = reward[:, None] + discount[:, None] * self.atoms(logits.device)
        return self.project(logits.softmax(-1), moved)

    def lowest(self, logits: Tensor) -> Tensor:
        """For each of N samples, the one of E distributions [E, N, K] with the smallest mean."""
        least = self.mean(logits).argmin(0)
        return logits.gather(0, least[None, :, None].expand(1, -1, self.count)).squeeze(0)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Sum over critics of the mean cross entropy; `logits` [E, N, K], `target` [N, K], or
    [E, N, K]: one for each critic."""
    return -(target * logits.log_softmax(-1)).sum(-1).mean(1).sum()
