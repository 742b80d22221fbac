"""HistoryEncoder: a Gaussian code z of the past, beside the present, for HIB (He et al., 2024).

    q(z|h) = N(mu(h), diag sigma(h)^2),   features = [o, mu(h)]

The past h are the elements of vector observations that are named NAME_k: NAME, k steps ago.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.policies.networks.encoders import Encoder

PAST = re.compile(r"_(\d+)$")
LATENT = 8  # size of z
CHANNELS = 16  # of the convolutions over time
SHORTEST = 16  # steps that the convolutions need
LOG_STD = (-5.0, 2.0)  # bounds of log sigma


class HistoryEncoder(Encoder):
    """Features [n, present + LATENT]; `policy.extractor` names this class."""

    now: Tensor
    past: Tensor

    def __init__(self, obs: Mapping[str, Leaf], *arguments: Any, **settings: Any) -> None:
        super().__init__(obs, *arguments, **settings)
        names = [name for leaf in super().only_vectors() for name in obs[leaf].names]
        ages = [int(found[1]) if (found := PAST.search(name)) else 0 for name in names]
        self.steps = max(ages, default=0)
        if self.steps < SHORTEST or sum(age > 0 for age in ages) % self.steps:
            raise ConfigError(
                f"HistoryEncoder needs observations NAME_k of {SHORTEST} or more steps k, "
                "the same for every NAME: env.history=32"
            )
        self.register_buffer("now", torch.tensor([i for i, age in enumerate(ages) if not age]))
        order = sorted((i for i, age in enumerate(ages) if age), key=lambda i: -ages[i])
        self.register_buffer("past", torch.tensor(order))
        each = len(order) // self.steps
        rest = ((self.steps - 8) // 4 + 1 - 3) // 2 + 1  # steps after both convolutions
        self.code = nn.Sequential(
            nn.Conv1d(each, CHANNELS, 8, stride=4),
            nn.ReLU(),
            nn.Conv1d(CHANNELS, CHANNELS, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(CHANNELS * rest, 2 * LATENT),
        )
        self.size = len(self.now) + LATENT

    def only_vectors(self) -> tuple[str, ...]:
        raise ConfigError("a policy with a HistoryEncoder is no plain network on vectors")

    def posterior(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of z, [n, LATENT] each."""
        return self._posterior(self.norm(self.flat(obs)))

    def forward(self, obs: Tensors) -> Tensor:
        values = self.norm(self.flat(obs))
        return torch.cat([values[:, self.now], self._posterior(values)[0]], 1)

    def _posterior(self, values: Tensor) -> tuple[Tensor, Tensor]:
        past = values[:, self.past].unflatten(1, (self.steps, -1)).mT
        mean, log_std = self.code(past).chunk(2, 1)
        return mean, log_std.clamp(*LOG_STD).exp()


class OracleEncoder(Encoder):
    """The usual encoder that sees `privileged/*` too: an upper bound for codes of the past."""

    def __init__(self, obs: Mapping[str, Leaf], *arguments: Any, **settings: Any) -> None:
        seen = {name: leaf for name, leaf in obs.items() if not name.startswith("critic/")}
        super().__init__(seen, *arguments, **{**settings, "asymmetric": True})
