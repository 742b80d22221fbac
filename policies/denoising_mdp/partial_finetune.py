"""PartialFinetune: a diffusion policy with frozen first and fine-tuned last denoising steps.

The result of fine-tuning with DPPO (Ren et al., 2024): the frozen `base` does the first steps and
`tuned` the `last` steps of the same schedule. Denoising is deterministic (DDIM, eta 0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.build import ConfigError, Node, build
from embodied.core.device import device_of
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.policies.generative.chunk_sampler import ObservesHistory
from embodied.policies.networks.encoders import Encoder
from embodied.policies.wrappers.real_time_chunking import SamplerStep


@dataclass(frozen=True)
class Config:
    """Settings of a diffusion policy of which a copy of the last steps is trained."""

    base: Node  # node of a diffusion policy
    last: Count = 4  # denoising steps of the fine-tuned copy


class PartialFinetune(ObservesHistory):
    """Partially fine-tuned diffusion policy. Noise [n, size] is the initial sample."""

    base: Any  # a Policy with `ddim_steps`, `embedded`, `split`, `past` and `names`
    tuned: Any  # the same

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        base: Any = build(config.base, Policy, spec=spec)
        tuned = build(config.base, Policy, spec=spec)
        if not hasattr(base, "ddim_steps"):
            raise ConfigError(
                "only the denoising steps of a diffusion policy (init=RUN, trained with env=) can "
                f"be fine-tuned, not {type(base).__name__}"
            )
        self.spec = spec
        self.chunk = base.chunk
        self.size = base.size
        self.first = getattr(base, "first", 0)
        self.base = base.requires_grad_(False)
        self.tuned = tuned
        self.past = self.base.past
        self.names = self.base.names
        self.grid = base.ddim_steps()
        if config.last > len(self.grid):
            raise ConfigError(f"last={config.last} is not in 1..{len(self.grid)} (its steps)")
        self.last = config.last

    @property
    def encoder(self) -> Encoder | None:
        return getattr(self.tuned, "encoder", None)

    @property
    def feature_size(self) -> int:
        return self.tuned.feature_size

    def features(self, obs: Tensors) -> Tensor:
        """Features [n, feature_size] by the encoder of the fine-tuned copy."""
        return self.tuned.features(obs)

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, self.size, device=device_of(self))

    def begin(self, obs: Tensors, x: Tensor) -> Tensor:
        """The base's denoising steps: from noise to the input [n, size] of the fine-tuned copy."""
        if self.last == len(self.grid):
            return x
        return self._denoise(self.base, obs, x, slice(None, -self.last))

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        x = self.begin(obs, noise)
        x = self._denoise(self.tuned, obs, x, slice(-self.last, None))
        return self.to_actions(x), carry

    def acts_as(self) -> Policy:
        """The fine-tuned copy; ConfigError if the base makes the first denoising steps."""
        if self.last < len(self.grid):
            raise ConfigError(
                f"the base makes the first {len(self.grid) - self.last} of {len(self.grid)} "
                "denoising steps and its copy the others, so this is no single policy; train with "
                f"finetune.last={len(self.grid)} for one"
            )
        return self.tuned

    def _denoise(self, policy: Any, obs: Tensors, x: Tensor, some: slice) -> Tensor:
        features = policy.features(obs)
        for step, time in zip(self.grid[some], policy.embedded()[some], strict=True):
            x0, e = policy.split(x, step, time, features)
            x = step.next_keep * x0 + step.next_remain * e
        return x

    def strides(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, list[SamplerStep]]:
        parts = [(self.base, slice(None, -self.last)), (self.tuned, slice(-self.last, None))]
        strides: list[SamplerStep] = []
        for policy, some in parts:
            features = policy.features(obs)
            times = policy.embedded()[some]
            strides += [
                policy.stride(step, time, features)
                for step, time in zip(self.grid[some], times, strict=True)
            ]
        return noise, strides

    @property
    def range(self) -> Callable[[Tensor], Tensor]:
        return self.base.range

    def goal(self, plan: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.base.goal(plan, weight)

    def to_actions(self, x: Tensor) -> Tensor:
        return self.base.to_actions(x)

    def fit(self, rows: Tensors) -> None:
        self.base.fit(rows)
        self.tuned.fit(rows)
