"""Consistency: a consistency policy, which maps noise to a chunk in one or a few steps.

Consistency training (Song et al., 2023), without a diffusion teacher (Prasad et al., 2024, distil
one). On the path x_t = (1 - t) z + t x_1 from noise z to a normalised chunk x_1,

    f(x, t, o) = x + (1 - t) net(x, t, o)

is trained to be constant along a trajectory. Of two neighbouring times on a grid of N = `levels`,
with the same z and x_1, the one nearer to the data gives the target, without gradient:

    loss = |f(x_t, t) - f(x_s, s)|^2 / (1.05 - t),   s = t + 1/N,   f(x_1, 1) = x_1.

The loss is squared, as the pseudo-Huber distance of Song and Dhariwal (2024) tends to the median
and under-represents rare modes (a mode of 30% became 13%). The action is f(z, 0); with K = `steps`
> 1 the result is noised again to t = i/K, i = 1 .. K-1, with new noise, and denoised again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from embodied.core.bounds import Bound, Levels
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.policies.generative import flow
from embodied.policies.generative.flow import Flow
from embodied.policies.wrappers.real_time_chunking import SamplerStep


@dataclass(frozen=True)
class Config(flow.Config):
    """Settings of a consistency policy, in addition to those of flow matching."""

    steps: Levels = 1  # sampling steps
    levels: Annotated[int, Bound(2)] = 80  # training times (more: sharper, slower)


class Consistency(Flow):
    """Noise [n, steps * chunk * A]: the initial sample, then what is added at each further step."""

    def __init__(self, config: Config, spec: Spec) -> None:
        if config.steps > config.levels:
            raise ConfigError(f"steps={config.steps} must be at most levels={config.levels}")
        super().__init__(config, spec)
        self.levels = config.levels
        if config.steps > 1:
            self.noise_steps = 0

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, self.steps * self.size, device=self.range.radius.device)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        features = self.features(obs)
        x, *fresh = noise.split(self.size, 1)
        for i, time in enumerate(self.embedded().unbind()):
            t = i / self.steps
            if i:
                x = torch.lerp(fresh[i - 1], x, t)
            x = self.spec.act.bounded(x + (1 - t) * self.net.at(x, time, features))
        return self.to_actions(x), carry

    def strides(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, list[SamplerStep]]:
        x, *fresh = noise.split(self.size, 1)
        strides = super().strides(obs, x)[1]
        for i, again in enumerate(fresh):
            share = (i + 1) / self.steps
            strides[i] = strides[i]._replace(onward=renoise(again, share, self.spec.act))
        return x, strides

    def clean(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Return f(x, t, o) [n, D] at times `t` [n], the predicted chunk."""
        return x + (1 - t)[:, None] * self.net(x, t, features)

    def errors(self, features: Tensor, target: Tensor) -> Tensor:
        z = torch.randn_like(target)
        level = torch.randint(self.levels, (len(z),), device=z.device)
        t = level / self.levels
        s = (level + 1) / self.levels
        with torch.no_grad():
            goal = self.clean(torch.lerp(z, target, s[:, None]), s, features)
        found = self.clean(torch.lerp(z, target, t[:, None]), t, features)
        return (found - goal).square() / (1.05 - t)[:, None]


def renoise(noise: Tensor, share: float, act: Leaf) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that maps a chunk to the next x, a mix of `share` of it and `noise`."""
    return lambda _, clean: torch.lerp(noise, act.bounded(clean), share)
