"""Learning-rate schedules of PPO, and gradient-norm clipping.

Learning rates are tensors, so that an update recorded as a CUDA graph can change them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from embodied.nn.optim import Adam

Schedule = Literal["constant", "linear", "cosine", "adaptive"]


class LearningRates(nn.Module):
    """The learning rates of several optimisers: `base_lrs` times a common factor `lr_scale`.

    `active` [optimisers]: 1, or 0 for a rate of 0. While the first one is 0 (a policy that waits
    for its critic), its KL divergence says nothing and `adapt` changes nothing.
    """

    base_lrs: Tensor
    lr_scale: Tensor
    active: Tensor

    def __init__(self, base_lrs: Sequence[float], kind: Schedule) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("base_lrs", torch.tensor(base_lrs))
        self.register_buffer("lr_scale", torch.tensor(1.0))
        self.register_buffer("active", torch.ones(len(base_lrs)), persistent=False)

    @property
    def scale(self) -> float:
        """The common factor."""
        return float(self.lr_scale)

    def schedule(self, progress: float) -> None:
        """Set the factor for `progress`, the completed share of the run."""
        left = 1 - min(progress, 1.0)
        if self.kind == "linear":
            self.lr_scale.fill_(left)
        elif self.kind == "cosine":
            self.lr_scale.fill_(0.5 - 0.5 * math.cos(math.pi * left))

    def adapt(self, kl: Tensor, target: float) -> None:
        """Multiply the rates by 1.5 if the KL divergence of an update is below half the target,
        divide them by 1.5 if it is above twice the target (Rudin et al., 2022)."""
        scale = self.lr_scale
        lower = torch.where(kl > 2 * target, scale / 1.5, scale)
        found = torch.where(kl < target / 2, scale * 1.5, lower)
        found = (found * self.base_lrs[0]).clamp(1e-5, 1e-2) / self.base_lrs[0]
        scale.copy_(torch.where(self.active[0] > 0, found, scale))

    def write(self, optims: Iterable[Adam]) -> None:
        """Write the rates into the optimisers, in their order."""
        for adam, rate, active in zip(optims, self.base_lrs, self.active, strict=False):
            group = adam.param_groups[0]
            if not isinstance(group["lr"], Tensor) or group["lr"].device != rate.device:
                group["lr"] = torch.empty_like(rate)
            torch.mul(self.lr_scale, rate, out=group["lr"]).mul_(active)


def clip_norm(grads: list[Tensor], most: float) -> Tensor:
    """Clip gradients in place to the total norm `most`; returns the norm before clipping. Never
    synchronises with the device."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_mul_(grads, (most / (norm + 1e-6)).clamp(max=1))  # pyright: ignore[reportPrivateImportUsage]
    return norm
