"""ReCOIL: imitation of a few expert episodes with any others (Sikchi et al., 2024).

No reward and no discriminator. Expert transitions E have a level of value, and every transition has
to be consistent with what follows it, at a cost for each step outside of the expert's:

    L_Q = sum_i E_E (Q_i(s, a) - L)^2 + E (Q_i(s, a) - y)^2,   y = -L (1 - d) + d V(s')

over all transitions of the batch, those of the expert included; V and the policy as in f-DVL. The
cost is that of a return of -L without end. Expert transitions have both targets, which lets values
flow back to states that lead to the expert's. After a termination (d = 0) the value is `ended` L:
-1 where episodes end by a failure, 1 where they end at the goal.

demos=[EXPERT,OTHERS,...]: the first dataset is the expert's; data.fractions=[0.5,0.5] gives it half
of every batch, as published. Recorded rewards are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from embodied.core.bounds import Bound, Positive
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.datasets.transitions import SOURCE
from embodied.learners.learner import RunPlan
from embodied.learners.offline import f_dvl


@dataclass(frozen=True)
class Config(f_dvl.Config):
    """Settings of ReCOIL: those of f-DVL, in units of `level`."""

    divergence: f_dvl.Divergence = "reverse_kl"  # which implicit maximum V is
    lam: Positive = 5.0  # lambda; larger where values drift
    normalize: bool = False  # divide Q - V by its standard deviation in the batch, in V's loss
    level: Positive = 200.0  # L, value of the expert's transitions
    ended: Annotated[float, Bound(-1.0, 1.0)] = -1.0  # value after a termination, in levels


class Recoil(f_dvl.FDvl):
    """`update` as in IQL; the batch's `source` is 0 for the expert's transitions."""

    extra_columns: tuple[str, ...] = (SOURCE,)

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
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
