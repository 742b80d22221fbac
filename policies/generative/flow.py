"""Flow: flow-matching policy, sampled with a few Euler steps (Lipman et al., 2023).

Rectified flow (Liu et al., 2023): x_t = (1 - t) x_0 + t x_1 with x_0 ~ N(0, I) and x_1 a normalised
action chunk; the network is trained to predict the velocity v(x_t, t, o) = x_1 - x_0. Sampling:
x <- x + v(x, i/K, o) / K for i = 0 .. K-1, clipped to [-1, 1] at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Levels
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.policies.generative import chunk_sampler
from embodied.policies.generative.chunk_sampler import ChunkSampler
from embodied.policies.wrappers.real_time_chunking import SamplerStep


@dataclass(frozen=True)
class Config(chunk_sampler.Config):
    """Settings of a flow-matching policy."""

    steps: Levels = 4  # Euler steps K


class Flow(ChunkSampler):
    """Flow-matching policy. Noise [n, chunk * A] is the initial sample x_0."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.steps = config.steps
        self.set_times(self.times())

    def times(self) -> Tensor:
        """The times i / K, [K]."""
        return torch.arange(self.steps, device=self.range.radius.device) / self.steps

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        features = self.features(obs)
        x = noise
        for time in self.embedded().unbind():
            x = torch.add(x, self.net.at(x, time, features), alpha=1 / self.steps)
        return self.to_actions(x), carry

    def velocity_at(self, x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        return self.net.at(x, time, features)

    def strides(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, list[SamplerStep]]:
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

    def errors(self, features: Tensor, target: Tensor) -> Tensor:
        """Squared errors of the velocity."""
        x0 = torch.randn_like(target)
        t = torch.rand(len(target), device=target.device)
        x = torch.lerp(x0, target, t[:, None])
        return (self.net(x, t, features) - (target - x0)).square()
