"""Multiplicative reward: progress times soft penalties, less a penalty at the end (CaRL; Jaeger et
al., "CaRL: Learning Scalable Planning Policies with Simple Rewards", 2025).

    r = scale (progress(s') prod_j p_j(s') - sum_k T_k(s')),   0 <= p_j <= 1

Progress is the percentage of the task done in this step, so that what can be obtained is finite,
and breaking several rules at once costs no more than the progress itself. Hard infractions are
terminations of the environment, with a small T. A factor that an untrained policy cannot avoid must
stay above 0.

A penalty that is held for k steps is a factor `held` of an observed clock (the time since the rule
was broken), not a memory of the reward: the critic needs that clock, or the value is not Markov.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from embodied.core.bounds import Number
from embodied.core.build import ConfigError, Node
from embodied.core.reward import SummedReward
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.rewards.handcrafted.factors import Factor


@dataclass(frozen=True)
class Config:
    """Settings of the product; see `embodied.rewards.handcrafted.factors` for factors. All of them
    are computed from the next observation."""

    progress: Node  # factor: progress made in this step
    factors: dict[str, Node] = field(default_factory=dict)  # factors in [0, 1] that multiply it
    penalties: dict[str, Node] = field(default_factory=dict)  # factors that are subtracted
    scale: Number = 1.0  # multiplies the whole


class Multiplicative(SummedReward):
    """Applied once, when transitions are stored. The environment's reward is not used."""

    frozen = True

    def __init__(self, config: Config, spec: Spec) -> None:
        self.config = config
        self.progress = Factor(config.progress, spec)
        self.factors = {name: Factor(node, spec) for name, node in config.factors.items()}
        self.penalties = {name: Factor(node, spec) for name, node in config.penalties.items()}
        for name, factor in self.factors.items():
            if not 0 < factor.weight <= 1:
                raise ConfigError(
                    f"reward.factors.{name}.weight is {factor.weight:g}: a factor of a product has "
                    "a weight in (0, 1]"
                )

    def components(self, transitions: Tensors) -> Tensors:
        done = self.progress(transitions)
        for factor in self.factors.values():
            done = done * factor(transitions)
        lost = {name: -penalty(transitions) for name, penalty in self.penalties.items()}
        return {name: self.config.scale * part for name, part in {"progress": done, **lost}.items()}
