"""Codes of the past, beside the present: HIB (He et al., 2024) and RMA (Kumar et al., 2021).

    features = [o_t, z],   z: mean of q(z|h) = N(mu(h), diag sigma(h)^2), or a code of privileged/*

The past h = (o_1, ..., o_k), o_k = o_t, is the one leaf of shape [k, D]: the wrapper `FrameStack`,
around an environment that observes its last action.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.nn.normalizers import MeanStdNormalizer
from embodied.policies.networks.encoders import Encoder, ImageConfig, PointConfig

LATENT = 8  # size of z
CHANNELS = 32  # of the convolutions over time
SHORTEST = 10  # steps that the convolutions need


class HistoryEncoder(Encoder):
    """Features [n, D + LATENT] with a code of the past; `policy.extractor` names this class."""

    def __init__(
        self,
        obs: Mapping[str, Leaf],
        images: ImageConfig | None = None,
        asymmetric: bool = False,
        points: PointConfig | None = None,
    ) -> None:
        super().__init__(obs, images, asymmetric, points)
        shapes = [obs[name].shape for name in self.names]
        if len(shapes) != 1 or len(shapes[0]) != 2 or shapes[0][0] < SHORTEST:
            raise ConfigError(
                f"a code of the past needs one observation of {SHORTEST} or more steps [k, D], and "
                f"there are {shapes}: env=quadrotor_past, or the wrapper FrameStack"
            )
        self.steps, self.each = shapes[0]
        self.size = self.each + LATENT
        self.code = self.coder(obs)

    def coder(self, obs: Mapping[str, Leaf]) -> nn.Module:
        """The network that makes the code."""
        rest = ((self.steps - 4) // 2 + 1 - 3) // 2 + 1  # steps after both convolutions
        return nn.Sequential(
            nn.Conv1d(self.each, CHANNELS, 4, stride=2),
            nn.ReLU(),
            nn.Conv1d(CHANNELS, CHANNELS, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(CHANNELS * rest, 2 * LATENT),
        )

    def only_vectors(self) -> tuple[str, ...]:
        raise ConfigError("a policy with a code of the past is no plain network on vectors")

    def posterior(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of z, [n, LATENT] each."""
        past = self.norm(self.flat(obs)).unflatten(1, (self.steps, self.each))
        mean, log_std = self.code(past.mT).chunk(2, 1)
        return mean, log_std.clamp(-5.0, 2.0).exp()

    def coded(self, obs: Tensors) -> Tensor:
        """The code [n, LATENT] that the policy gets."""
        return self.posterior(obs)[0]

    def forward(self, obs: Tensors) -> Tensor:
        now = self.norm(self.flat(obs))[:, -self.each :]
        return torch.cat([now, self.coded(obs)], 1)


class PrivilegedEncoder(HistoryEncoder):
    """The same with a code of `privileged/*`: the teacher of RMA, an upper bound for others."""

    def coder(self, obs: Mapping[str, Leaf]) -> nn.Module:
        self.privileged = sorted(name for name in obs if name.startswith("privileged/"))
        size = sum(obs[name].size for name in self.privileged)
        self.scale = MeanStdNormalizer(size)
        return nn.Sequential(nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, LATENT))

    def coded(self, obs: Tensors) -> Tensor:
        return self.code(self.scale(torch.cat([obs[name] for name in self.privileged], 1)))

    def fit(self, rows: Tensors) -> None:
        super().fit(rows)
        self.scale.fit(torch.cat([rows[f"obs/{name}"] for name in self.privileged], 1))


def encoder_of(policy: Policy) -> HistoryEncoder:
    """The policy's code of the past; ConfigError if there is none."""
    encoder = getattr(policy, "encoder", None)
    if not isinstance(encoder, HistoryEncoder):
        raise ConfigError(
            f"{type(policy).__name__} has no code of the past: "
            "policy.extractor=embodied.policies.networks.history.HistoryEncoder"
        )
    return encoder
