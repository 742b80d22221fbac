"""MinimalIterative: two steps of regression, the minimal iterative policy (Pan et al., 2025).

MIP (arXiv 2512.01809). One network pi(o, x, t) predicts the normalised chunk a twice, at t = 0 from
nothing and at t = t* from a noisy chunk; no distribution is fitted:

    loss = |pi(o, 0, 0) - a|^2 + |pi(o, t* a + (1 - t*) z, t*) - a|^2,   z ~ N(0, I)
    a_0  = pi(o, 0, 0),   action = pi(o, t* a_0, t*)

With z = 0 the action is a function of the observation. For exploration z is drawn as in training:
action = pi(o, t* a_0 + (1 - t*) z, t*). The authors' code adds noise without scaling a by t*, and
weighs the terms by 1 / t*^2 and 1 / (1 - t*)^2; here both count alike, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from embodied.core.bounds import Bound
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.policies.generative import chunk_sampler
from embodied.policies.generative.chunk_sampler import ChunkSampler
from embodied.policies.wrappers.real_time_chunking import SamplerStep


@dataclass(frozen=True)
class Config(chunk_sampler.Config):
    """Settings of a minimal iterative policy."""

    time: Annotated[float, Bound(above=0.0, below=1.0)] = 0.9  # t* of the second step


class MinimalIterative(ChunkSampler):
    """Minimal iterative policy. Noise [n, chunk * A] is z, zero without exploration."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.time = config.time
        self.set_times(torch.tensor([0.0, config.time]))

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        noise = torch.zeros(n, self.size, device=self.range.radius.device)
        return noise.normal_() if explore else noise

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        features = self.features(obs)
        first, second = self.embedded().unbind()
        x = self.net.at(torch.zeros_like(noise), first, features)
        x = self.net.at(torch.lerp(noise, x, self.time), second, features)
        return self.to_actions(x), carry

    def strides(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, list[SamplerStep]]:
        features = self.features(obs)
        first, second = self.embedded().unbind()
        return torch.zeros_like(noise), [
            SamplerStep(
                keep=0.0,
                remain=1.0,
                clean=lambda x: self.net.at(x, first, features),
                onward=lambda _, clean: torch.lerp(noise, clean, self.time),
            ),
            SamplerStep(
                keep=self.time,
                remain=1 - self.time,
                clean=lambda x: self.net.at(x, second, features),
                onward=lambda _, clean: clean,
            ),
        ]

    def errors(self, features: Tensor, target: Tensor) -> Tensor:
        """Squared errors of both steps."""
        first, second = self.embedded().unbind()
        noisy = torch.lerp(torch.randn_like(target), target, self.time)
        once = self.net.at(torch.zeros_like(target), first, features)
        twice = self.net.at(noisy, second, features)
        return (once - target).square() + (twice - target).square()
