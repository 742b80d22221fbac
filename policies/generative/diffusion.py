"""Diffusion: diffusion policy (Chi et al., 2023), trained as DDPM and sampled with DDIM.

DDPM: Ho et al. (2020); DDIM: Song et al. (2021). With the cosine schedule abar_t and a normalised
chunk x_0, the network predicts the noise e of x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) e. A step
from level t to s clips x_0 = (x_t - sqrt(1 - abar_t) e) / sqrt(abar_t) to [-1, 1], recomputes e
from it, and returns

    x_s = sqrt(abar_s) x_0 + sqrt(1 - abar_s - sigma^2) e + sigma z,
    sigma^2 = eta^2 (1 - abar_s) / (1 - abar_t) (1 - abar_t / abar_s).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embodied.core.bounds import Levels
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.policies.generative import chunk_sampler
from embodied.policies.generative.chunk_sampler import ChunkSampler
from embodied.policies.wrappers.real_time_chunking import SamplerStep


@dataclass(frozen=True)
class Config(chunk_sampler.Config):
    """Settings of a diffusion policy."""

    train_steps: Levels = 100  # noise levels T
    steps: Levels = 10  # DDIM sampling steps, a divisor of T


class Step(NamedTuple):
    """Coefficients of one DDIM step from level `t`. `keep`, `remain`: sqrt(abar), sqrt(1 - abar)
    at `t`; `next_keep`, `next_remain`, `sigma`: factors of x_0, e and z at the next level. For
    samples at different levels they are tensors [n, 1] (`Step._make`)."""

    t: int
    keep: float
    remain: float
    next_keep: float
    next_remain: float
    sigma: float


class Diffusion(ChunkSampler):
    """Diffusion policy. Noise [n, chunk * A] is the initial sample; eta is 0."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.config = config
        self.forward_process, self.sampler = schedulers(config)
        self.grid = self.ddim_steps()
        self.set_times(torch.tensor([step.t for step in self.grid]) / config.train_steps)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        features = self.features(obs)
        x = noise
        for step, time in zip(self.grid, self.embedded().unbind(), strict=True):
            x0, e = self.split(x, step, time, features)
            x = step.next_keep * x0 + step.next_remain * e
        return self.to_actions(x), carry

    def ddim_steps(self, eta: float = 0.0) -> list[Step]:
        """The sampler's steps; DPPO trains the last ones of policies that have this method."""
        abar = self.sampler.alphas_cumprod.tolist()
        return steps(abar, self.sampler.timesteps.tolist(), eta)

    def split(self, x: Tensor, step: Step, time: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The predicted chunk x_0, clipped, and noise e, [n, size] each, for `x` [n, size]."""
        e = self.net.at(x, time, features)
        x0 = self.clip(_minus(x, step.remain, e) / step.keep, step)
        return x0, _minus(x, step.keep, x0) / step.remain

    def clip(self, x0: Tensor, step: Step) -> Tensor:
        """The predicted chunk as the next step uses it: in [-1, 1].

        Where a wrapper normalises actions: in the range of the data, and not clipped at the last
        step. At high noise levels the prediction is a small number divided by a smaller one.
        """
        act = self.spec.act
        if not act.is_normalized:
            return x0.clamp(-1, 1)
        return x0 if step.next_remain == 0 else x0.clamp(act.low, act.high)  # pyright: ignore

    def strides(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, list[SamplerStep]]:
        features = self.features(obs)
        steps = zip(self.grid, self.embedded().unbind(), strict=True)
        return noise, [self.stride(step, time, features) for step, time in steps]

    def stride(self, step: Step, time: Tensor, features: Tensor) -> SamplerStep:
        def clean(x: Tensor) -> Tensor:
            e = self.net.at(x, time, features)
            return torch.add(x, e, alpha=-step.remain) / step.keep

        def onward(x: Tensor, x0: Tensor) -> Tensor:
            x0 = self.clip(x0, step)
            e = torch.add(x, x0, alpha=-step.keep) / step.remain
            return step.next_keep * x0 + step.next_remain * e

        return SamplerStep(step.keep, step.remain, clean, onward)

    def embed(self, level: Tensor) -> Tensor:
        """Time embeddings of noise levels [n] (int64)."""
        return self.net.embed(level / self.config.train_steps)

    def errors(self, features: Tensor, target: Tensor) -> Tensor:
        """Squared errors of the predicted noise."""
        e = torch.randn_like(target)
        level = torch.randint(self.config.train_steps, (len(target),), device=target.device)
        x = self.forward_process.add_noise(target, e, level)
        return (self.net.at(x, self.embed(level), features) - e).square()


def schedulers(config: Config) -> tuple[Any, Any]:
    """The DDPMScheduler of diffusers for training, and its DDIMScheduler with `config.steps`."""
    if config.train_steps % config.steps:
        raise ConfigError(
            f"steps={config.steps} must divide train_steps={config.train_steps} evenly"
        )
    try:
        from diffusers.schedulers.scheduling_ddim import DDIMScheduler
        from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
    except ImportError as error:
        raise ConfigError(
            "embodied.policies.generative.diffusion needs diffusers: "
            'pip install "embodied-rl[diffusion]"'
        ) from error
    settings = {
        "num_train_timesteps": config.train_steps,
        "beta_schedule": "squaredcos_cap_v2",
        "prediction_type": "epsilon",
        "clip_sample": True,
    }
    # "leading" spacing starts below the top level, where sqrt(abar) is so small that x_0 depends
    # mostly on the network's error; with few steps that changes the frequencies of the modes.
    sampler = DDIMScheduler(**settings, timestep_spacing="leading")
    sampler.set_timesteps(config.steps)
    return DDPMScheduler(**settings), sampler


def _minus(x: Tensor, factor: float | Tensor, y: Tensor) -> Tensor:
    """Return x - factor * y; one kernel where the factor is a number."""
    return x - factor * y if isinstance(factor, Tensor) else torch.add(x, y, alpha=-factor)


def steps(abar: Sequence[Any], levels: Sequence[int], eta: float) -> list[Step]:
    """The DDIM steps through the evenly spaced `levels`, the last one 0, of a schedule of numbers
    (or of float32 scalars, with their rounding); a scheduler's own `step` is slower than a small
    network."""
    stride = len(abar) // len(levels)
    result: list[Step] = []
    for t in levels:
        here, there = abar[t], abar[t - stride] if t >= stride else 1.0
        variance = eta**2 * (1 - there) / (1 - here) * (1 - here / there)
        ends = (here, 1 - here, there, max(1 - there - variance, 0.0), variance)
        result.append(Step(t, *(float(value**0.5) for value in ends)))
    return result
