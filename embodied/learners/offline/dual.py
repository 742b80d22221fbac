"""f-DVL and ReCOIL: dual value learning (Sikchi et al., 2024): IQL with other implicit maxima.

**f-DVL**: regularised RL in its dual form gives a value loss for each f-divergence. With x = min_i
Q'_i - V,

    tv              lambda max(x, 0) - (1 - lambda) x             (V: quantile 2 - 1 / lambda)
    chi2            lambda f*(x) - (1 - lambda) x                 (f*: x + x^2 / 4, -1 if x < -2)
    chi2_reference  lambda max(x + x^2 / 4, 0) - (1 - lambda) x   (as in the authors' code)
    reverse_kl      exp(z - z*) - (z + 1) exp(-z*)                (V: lambda log E exp(Q / lambda))

with z = min(x / lambda, `exponent`) and z* = max(max z, -1) of the batch. The authors' chi2 has a
second rising branch below x = -4, which makes V a mean of Q once advantages exceed 4. All but tv
depend on the scale of Q: with `normalize` x is divided by its standard deviation in the batch.

Other differences from the paper: squared errors for Q, and V is fitted at the data's actions only.

**ReCOIL**: imitation of a few expert episodes with any others; no reward and no discriminator.
Expert transitions E have a level of value, and every transition has to be consistent with what
follows it, at a cost for each step outside of the expert's:

    L_Q = sum_i E_E (Q_i(s, a) - L)^2 + E (Q_i(s, a) - y)^2,   y = -L (1 - d) + d V(s')

over all transitions of the batch, those of the expert included; V and the policy as in f-DVL. The
cost is that of a return of -L without end. Expert transitions have both targets, which lets values
flow back to states that lead to the expert's. After a termination (d = 0) the value is `ended` L:
-1 where episodes end by a failure, 1 where they end at the goal.

demos=[EXPERT,OTHERS,...]: the first dataset is the expert's. Recorded rewards are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from embodied.core.bounds import Bound, Positive
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.datasets.transitions import SOURCE
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


@dataclass(frozen=True)
class RecoilConfig(Config):
    """Settings of ReCOIL: those of f-DVL, in units of `level`."""

    divergence: Divergence = "reverse_kl"  # which implicit maximum V is
    lam: Positive = 5.0  # lambda; larger where values drift
    normalize: bool = False  # divide Q - V by its standard deviation in the batch, in V's loss
    level: Positive = 200.0  # L, value of the expert's transitions
    ended: Annotated[float, Bound(-1.0, 1.0)] = -1.0  # value after a termination, in levels


class Recoil(FDvl):
    """`update` as in IQL; the batch's `source` is 0 for the expert's transitions."""

    extra_columns: tuple[str, ...] = (SOURCE,)

    def __init__(self, config: RecoilConfig, policy: Policy, spec: Spec, run: RunPlan) -> None:
        super().__init__(config, policy, spec, run)

    def fit(self, transitions: Tensors) -> None:
        if not transitions[SOURCE].any():
            raise ConfigError(
                "learner=recoil needs others than the expert's: demos=[EXPERT,OTHERS]"
            )
        super().fit(transitions)

    def _loss(self, batch: Tensors) -> tuple[Tensor, Tensors]:
        level = self.config.level
        discount = batch["discount"]
        after = (discount == 0) * self.gamma * (1 + self.config.ended)
        return super()._loss({**batch, "reward": level * (discount - 1 + after)})

    def critic_terms(self, batch: Tensors, q: Tensor) -> Tensor:
        """The squared distance of the expert's values to the level."""
        expert = (batch[SOURCE] == 0).float()
        error = (q - self.config.level).square() * expert
        return (error.sum(1) / expert.sum().clamp(min=1)).sum()
