"""f-DVL: dual value learning (Sikchi et al., 2024): IQL with other implicit maxima.

Regularised RL in its dual form gives a value loss for each f-divergence. With x = min_i Q'_i - V,

    tv              lambda max(x, 0) - (1 - lambda) x             (V: quantile 2 - 1 / lambda)
    chi2            lambda f*(x) - (1 - lambda) x                 (f*: x + x^2 / 4, -1 if x < -2)
    chi2_reference  lambda max(x + x^2 / 4, 0) - (1 - lambda) x   (as in the authors' code)
    reverse_kl      exp(z - z*) - (z + 1) exp(-z*)                (V: lambda log E exp(Q / lambda))

with z = min(x / lambda, `exponent`) and z* = max(max z, -1) of the batch. The authors' chi2 has a
second rising branch below x = -4, which makes V a mean of Q once advantages exceed 4. All but tv
depend on the scale of Q: with `normalize` x is divided by its standard deviation in the batch.

Other differences from the paper: squared errors for Q, and V is fitted at the data's actions only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied.core.bounds import Positive
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.learners.learner import RunPlan
from embodied.learners.offline import iql

Divergence = Literal["tv", "chi2", "chi2_reference", "reverse_kl"]


@dataclass(frozen=True)
class Config(iql.ImplicitConfig):
    """Settings of f-DVL: those of IQL but the expectile, and of the value loss."""

    divergence: Divergence = "chi2"  # which implicit maximum V is
    lam: Positive = 0.8  # lambda: to 1 the maximum (tv: above 0.5); reverse_kl: a temperature
    exponent: Positive = 7.0  # largest (Q - V) / lambda in reverse_kl
    normalize: bool = True  # divide Q - V by its standard deviation in the batch, in V's loss


class FDvl(iql.ImplicitQ):
    """`update` as in IQL."""

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        low = 0.5 if config.divergence == "tv" else 0.0
        if config.divergence != "reverse_kl" and not low < config.lam <= 1:
            raise ConfigError(
                f"lam={config.lam:g} should be above {low:g} and at most 1 with "
                f"divergence={config.divergence}"
            )
        super().__init__(config, policy, spec, run)

    def value_loss(self, best: Tensor, value: Tensor) -> Tensor:
        gap = best - value
        if self.config.normalize:
            gap = gap / gap.detach().std(correction=0).clamp(min=1e-6)
        if self.config.divergence == "reverse_kl":
            return reverse_kl_loss(gap, self.config.lam, self.config.exponent)
        return dual_loss(gap, self.config.divergence, self.config.lam)


def dual_loss(gap: Tensor, divergence: Divergence, lam: float) -> Tensor:
    """The mean of lam f*(gap) - (1 - lam) gap; `gap` [N] = Q - V."""
    if divergence == "tv":
        conjugate = gap.clamp(min=0)
    elif divergence == "chi2":
        held = gap.clamp(min=-2)
        conjugate = held + held.square() / 4
    else:
        conjugate = (gap + gap.square() / 4).clamp(min=0)
    return (lam * conjugate - (1 - lam) * gap).mean()


def reverse_kl_loss(gap: Tensor, lam: float, exponent: float) -> Tensor:
    """The mean of exp(z) - z - 1, z = gap / lam at most `exponent`, scaled by exp(-z*)."""
    z = (gap / lam).clamp(max=exponent)
    top = z.detach().amax().clamp(min=-1)
    return (torch.exp(z - top) - (z + 1) * torch.exp(-top)).mean()
