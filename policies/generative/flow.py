"""Flow: flow-matching policy, sampled with a few Euler steps (Lipman et al., 2023).

Rectified flow (Liu et al., 2023): x_t = (1 - t) x_0 + t x_1 with x_0 ~ N(0, I) and x_1 a normalised
action chunk; the network is trained to predict the velocity v(x_t, t, o) = x_1 - x_0. Sampling:
x <- x + v(x, i/K, o) / K for i = 0 .. K-1, clipped to [-1, 1] at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.build import ConfigError, Node
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.nn.networks import per_row, sinusoid
from embodied.nn.normalizers import MinMaxNormalizer
from embodied.policies.generative.denoisers import denoiser
from embodied.policies.generative.guidance import SamplerStep
from embodied.policies.generative.observation_history import EncodesHistory
from embodied.policies.networks.encoders import Encoder, ImageConfig
from embodied.policies.networks.pointnet import PointConfig


@dataclass(frozen=True)
class Config:
    """Settings of a flow-matching policy."""

    chunk: Count = 8  # actions of one decision
    steps: Count = 4  # Euler steps K
    width: Count = 256  # units of the residual MLP
    depth: Count = 2  # residual blocks of the MLP
    time_dim: Count = 16  # size of the time embedding, even
    net: Node | None = None  # node of another network, see policies.generative.denoisers
    obs_steps: Count = 1  # observations that the policy sees, the present one included
    images: ImageConfig = field(default_factory=ImageConfig)  # encoder of images
    points: PointConfig = field(default_factory=PointConfig)  # encoder of point clouds


class Flow(EncodesHistory):
    """Flow-matching policy. Noise [n, chunk * A] is the initial sample x_0."""

    waves: Tensor

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        if spec.act.dtype != "float32":
            raise ConfigError("this policy needs continuous actions, not discrete ones")
        self.spec, self.chunk, self.steps = spec, config.chunk, config.steps
        self.size = config.chunk * spec.act.size
        self.noise_steps = config.chunk
        self.encoder = Encoder(spec.obs, config.images, points=config.points)
        self.set_obs_steps(config.obs_steps)
        self.range = MinMaxNormalizer(spec.act.size, spec.act.is_normalized)
        self.net = denoiser(
            config.net,
            config.chunk,
            spec.act.size,
            self.feature_size,
            config.width,
            config.depth,
            config.time_dim,
        )
        waves = sinusoid(self.times(), self.net.time_dim)
        self.register_buffer("waves", waves, persistent=False)

    def times(self) -> Tensor:
        """The times i / K, [K]."""
        return torch.arange(self.steps, device=self.range.radius.device) / self.steps

    def embedded(self) -> Tensor:
        """The network's embeddings [K, time_dim] of `times`."""
        return self.net.time(self.waves)

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, self.size, device=self.range.radius.device)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        features = self.features(obs)
        x = noise
        for time in self.embedded().unbind():
            x = torch.add(x, self.net.at(x, time, features), alpha=1 / self.steps)
        return self.to_actions(x), carry

    def strides(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, list[SamplerStep]]:
        """The initial sample and the sampler's steps, for guidance."""
        features = self.features(obs)

        def stride(i: int, time: Tensor) -> SamplerStep:
            remain = 1 - i / self.steps
            return SamplerStep(
                keep=i / self.steps,
                remain=remain,
                clean=lambda x: torch.add(x, self.net.at(x, time, features), alpha=remain),
                onward=lambda x, clean: torch.lerp(x, clean, 1 / (self.steps - i)),
            )

        return noise, [stride(i, time) for i, time in enumerate(self.embedded().unbind())]

    def to_actions(self, x: Tensor) -> Tensor:
        """Map normalised chunks [n, chunk * A] to actions [n, chunk, A] in [-1, 1] (not clamped
        where the action is normalised by a wrapper)."""
        bounded = self.spec.act.bounded
        x = bounded(x).view(-1, self.chunk, *self.spec.act.shape)
        return bounded(self.range.inverse(x))

    def loss(self, batch: Tensors) -> Tensor:
        """Mean squared error of the velocity over the valid steps, [n]."""
        features = self.features(under(batch, "obs"))
        target = self.range(batch["action"]).flatten(1)
        x0, t = torch.randn_like(target), torch.rand(len(target), device=target.device)
        x = torch.lerp(x0, target, t[:, None])
        error = (self.net(x, t, features) - (target - x0)).square()
        return per_row(error.view_as(batch["action"]), batch["valid"])

    def fit(self, rows: Tensors) -> None:
        self.encoder.fit(rows)
        self.range.fit(rows["action"].reshape(-1, self.spec.act.size))
