"""Learning-rate schedules of PPO, and clipping of the gradient's norm.

Rates are tensors, so that a step that is recorded as a CUDA graph can change them on the device.
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
    """The rates of several optimisers, `base_lrs` times one common `lr_scale`."""

    base_lrs: Tensor
    lr_scale: Tensor

    def __init__(self, base_lrs: Sequence[float], kind: Schedule) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("base_lrs", torch.tensor(base_lrs))
        self.register_buffer("lr_scale", torch.tensor(1.0))

    def schedule(self, progress: float) -> None:
        """Set the scale for the share `progress` of the run that is over."""
        left = 1 - min(progress, 1.0)
        if self.kind == "linear":
            self.lr_scale.fill_(left)
        elif self.kind == "cosine":
            self.lr_scale.fill_(0.5 - 0.5 * math.cos(math.pi * left))

    def adapt(self, kl: Tensor, target: float) -> None:
        """Raise the rates by half if the divergence of an update is below half its target, lower
        them by a third if it is above twice the target (Rudin et al., 2022)."""
        scale = self.lr_scale
        lower = torch.where(kl > 2 * target, scale / 1.5, scale)
        scale.copy_(torch.where(kl < target / 2, scale * 1.5, lower))
        scale.copy_((scale * self.base_lrs[0]).clamp(1e-5, 1e-2) / self.base_lrs[0])

    def write(self, optims: Iterable[Adam]) -> None:
        """Write the rates into the optimisers, in their order."""
        for adam, rate in zip(optims, self.base_lrs, strict=False):
            group = adam.param_groups[0]
            if not isinstance(group["lr"], Tensor) or group["lr"].device != rate.device:
                group["lr"] = torch.empty_like(rate)
            torch.mul(self.lr_scale, rate, out=group["lr"])


def clip_norm(grads: list[Tensor], most: float) -> Tensor:
    """Scale gradients so that their total norm is at most `most`; returns the norm before. Never
    waits for the device."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_mul_(grads, (most / (norm + 1e-6)).clamp(max=1))  # pyright: ignore[reportPrivateImportUsage]
    return norm
