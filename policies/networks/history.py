"""Encoders with a short code of the past, which stands for what is not observed.

`policy.extractor=embodied.policies.networks.history.CLASS` uses one of them:

- `HistoryEncoder`, of SkillMimic-V2 (Yu et al., 2025): convolutions over the last frames. Here the
  code is learned with the policy; the authors pretrain it to predict the next state.
- `PastEncoder`, of HIB (He et al., 2024) and RMA (Kumar et al., 2021): a distribution of codes.
- `PrivilegedEncoder`, of RMA's teacher: the code is that of `privileged/*` and not of the past.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.nn.networks import mlp
from embodied.nn.normalizers import MeanStdNormalizer
from embodied.policies.networks.encoders import Encoder, ImageConfig, PointConfig

FRAMES, FRAME = "history_frames", "reference"
CHANNELS = (64, 32)  # of the convolutions of kernel 3
CODE = 8  # numbers of the code; the released model of SkillMimic-V2 has 3
UNITS = (128, 64)  # of the hidden layers on a stacked past


class HistoryEncoder(Encoder):
    """Encodes `history_frames` [n, K D] (the frames of `embodied.envs.wrappers.mimic`, whose
    `reference` has D elements) to CODE numbers, and the other observations as `Encoder` does."""

    def __init__(
        self,
        obs: Mapping[str, Leaf],
        images: ImageConfig | None = None,
        asymmetric: bool = False,
        points: PointConfig | None = None,
    ) -> None:
        if FRAMES not in obs or FRAME not in obs:
            raise ConfigError(f"HistoryEncoder needs the observations {FRAMES} and {FRAME}")
        others = {name: leaf for name, leaf in obs.items() if name != FRAMES}
        super().__init__(others, images, asymmetric, points)
        self.width = obs[FRAME].size
        steps = obs[FRAMES].size // self.width
        layers: list[nn.Module] = []
        sizes = (self.width, *CHANNELS)
        for inputs, outputs in zip(sizes, CHANNELS, strict=False):
            layers += [nn.Conv1d(inputs, outputs, 3, padding=1), nn.ReLU()]
        self.past = nn.Sequential(*layers, nn.Flatten(), nn.Linear(CHANNELS[-1] * steps, CODE))
        self.names = [*self.names, FRAMES]
        self.size += CODE

    def forward(self, obs: Tensors) -> Tensor:
        frames = obs[FRAMES].unflatten(1, (-1, self.width)).transpose(1, 2)
        return torch.cat([super().forward(obs), self.past(frames)], 1)


class PastEncoder(Encoder):
    """Features [n, D + CODE]: the present, and the mean of q(z|h) = N(mu(h), diag sigma(h)^2).

    The past h is all observations of the policy, each a stack [k, ...] (wrapper `FrameStack`) whose
    last step is the present.
    """

    def __init__(
        self,
        obs: Mapping[str, Leaf],
        images: ImageConfig | None = None,
        asymmetric: bool = False,
        points: PointConfig | None = None,
    ) -> None:
        super().__init__(obs, images, asymmetric, points)
        shapes = {name: obs[name].shape for name in self.names}
        if self.names != self.vectors or any(len(shape) != 2 for shape in shapes.values()):
            raise ConfigError(
                f"a code of the past needs stacked vectors [k, D] and there are {shapes}: the "
                "wrapper FrameStack with all that the policy observes (env=patrol_actuators)"
            )
        self.lengths = [obs[name].size for name in self.names]
        self.widths = [width for _, width in shapes.values()]
        self.coder = self.make_coder(obs)
        self.size = sum(self.widths) + CODE

    def make_coder(self, obs: Mapping[str, Leaf]) -> nn.Module:
        """The network that makes the code, or what it is a distribution of."""
        return mlp(self.size, UNITS, 2 * CODE)

    def posterior(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of z, [n, CODE] each."""
        mean, log_std = self.coder(self.norm(self.flat(obs))).chunk(2, 1)
        return mean, log_std.clamp(-5.0, 2.0).exp()

    def coded(self, obs: Tensors) -> Tensor:
        """The code [n, CODE] that the policy gets."""
        return self.posterior(obs)[0]

    def forward(self, obs: Tensors) -> Tensor:
        pasts = self.norm(self.flat(obs)).split(self.lengths, 1)
        now = [past[:, -width:] for past, width in zip(pasts, self.widths, strict=True)]
        return torch.cat([*now, self.coded(obs)], 1)


class Known(nn.Module):
    """What only simulation knows: the vectors `privileged/*`, standardised, [n, size]."""

    def __init__(self, obs: Mapping[str, Leaf]) -> None:
        super().__init__()
        vectors = {name: leaf for name, leaf in obs.items() if len(leaf.shape) == 1}
        self.names = sorted(name for name in vectors if name.startswith("privileged/"))
        if not self.names:
            raise ConfigError(
                "a code is to tell what only simulation knows, and there is no vector "
                f"privileged/* among {sorted(obs)} (env=patrol_actuators has one)"
            )
        self.size = sum(vectors[name].size for name in self.names)
        self.norm = MeanStdNormalizer(self.size)

    def forward(self, obs: Tensors) -> Tensor:
        return self.norm(torch.cat([obs[name] for name in self.names], 1))

    def fit(self, rows: Tensors) -> None:
        """Set the normaliser from data with `obs/*` [N, ...]."""
        self.norm.fit(torch.cat([rows[f"obs/{name}"] for name in self.names], 1))


class PrivilegedEncoder(PastEncoder):
    """The same with a code of `Known`: RMA's teacher, and an upper bound for others."""

    def make_coder(self, obs: Mapping[str, Leaf]) -> nn.Module:
        self.known = Known(obs)
        return mlp(self.known.size, UNITS[1:], CODE)

    def coded(self, obs: Tensors) -> Tensor:
        return self.coder(self.known(obs))

    def fit(self, rows: Tensors) -> None:
        super().fit(rows)
        self.known.fit(rows)


def encoder_of(policy: Policy) -> PastEncoder:
    """The policy's code of the past; ConfigError if there is none."""
    encoder = getattr(policy, "encoder", None)
    if not isinstance(encoder, PastEncoder):
        raise ConfigError(
            f"{type(policy).__name__} has no code of the past: "
            "policy.extractor=embodied.policies.networks.history.PastEncoder"
        )
    return encoder
