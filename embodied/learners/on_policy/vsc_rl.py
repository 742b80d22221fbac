"""VSC-RL: subgoal-conditioned PPO on a variational lower bound (Wu et al., 2025).

    log p(O | g) >= sum_i E[ R(tau_i, sg_i) ] - sum_i KL( pi(. | s, sg_i) || pi_ref(. | s, g) )

O is success at the goal g, and sg_1 .. sg_n are the subgoals that a planner names. An episode falls
into pieces tau_i: piece i ends when sg_i is reached, or with the episode. Its return is

    R(tau_i, sg_i) = sum_t r_t + subgoal_reward 1[sg_i is reached]

and nothing that comes after the piece counts in it. The policy and the value function observe the
active subgoal (`subgoal`, as `rewards.language.subgoal_bonus.ObservedSubgoals` adds it; its first
number is 0 where there is none); the reference pi_ref (`prior`), such as a behaviour cloning of
demonstrations, does not. Without this observation the goal is the only subgoal, and an episode is
one piece.

The source maximises the first term by the likelihood of the best pieces, for a large language
model that acts; here it is maximised by PPO. `prior_weight` weights the second term.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import NonNegative
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.learners import prior
from embodied.learners.learner import RunPlan

SUBGOAL = "subgoal"


@dataclass(frozen=True)
class Config(prior.PpoConfig):
    subgoal_reward: NonNegative = 1.0  # of a subgoal that is reached


class VscRl(prior.PpoPrior):
    """`update` as in PPO. `bound` is the lower bound per decision, of `bound_reward` and
    `prior_kl`; `pieces`: subgoals reached per decision."""

    config: Config

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        super().__init__(config, policy, spec, run)

    @torch.no_grad()
    def _table(self, batch: Tensors, carry: Tensors) -> tuple[Tensors, dict[str, Tensor]]:
        reached = subgoal_reached(batch)
        pieces = {
            "reward": batch["reward"] + self.config.subgoal_reward * reached,
            "discount": batch["discount"] * ~reached,
            "ended": batch["ended"] | reached,
        }
        table, metrics = super()._table({**batch, **pieces}, carry)
        share = batch["valid"] / batch["valid"].sum().clamp(min=1)
        reward = (pieces["reward"] * share).sum()
        bound = reward - self.config.prior_weight * metrics["prior_kl"]
        return table, metrics | {
            "bound": bound,
            "bound_reward": reward,
            "pieces": (reached * share).sum(),
        }


def subgoal_reached(batch: Tensors) -> Tensor:
    """Whether a decision reached the active subgoal, after which another one is active, or none:
    [T, B] (bool)."""
    if f"obs/{SUBGOAL}" not in batch:
        return torch.zeros_like(batch["valid"])
    before = batch[f"obs/{SUBGOAL}"]
    after = batch[f"next_obs/{SUBGOAL}"]
    return (before[..., 0] > 0) & (before != after).any(-1) & batch["valid"]
