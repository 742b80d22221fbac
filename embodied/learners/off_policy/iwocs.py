"""Iwocs: SAC that also trains what a member of an IWOCS set needs (Zouitine et al., 2023).

Beside SAC's policy pi and soft critics, which are not comparable across members,

    y   = r + d min_i Q'_i(s', a'),   a' ~ pi(.|s'),   L_Q = sum_i E (Q_i(s, a) - y)^2
    L_T = E |T(s, a) - s'|_1 / D

Q are the values of pi without an entropy bonus and T predicts the next observation. The set, and
when a member is admissible: `embodied.policies.wrappers.iwocs`. The next member is trained at the
worst parameters of the set so far (`embodied eval ... worst_case=true`, `teacher.fixed`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each, under
from embodied.learners.actor_critic import draw
from embodied.learners.critics import critic_loss
from embodied.learners.learner import soft_update
from embodied.learners.off_policy import sac
from embodied.nn.optim import Adam
from embodied.policies.wrappers.iwocs import Member


@dataclass(frozen=True)
class Config(sac.Config):
    predictor_lr: PositiveFraction = 1e-3  # Adam's learning rate of the predictor


class Iwocs(sac.Sac):
    """`update` as in SAC; the values and the predictor learn from its last `batch_size`
    transitions."""

    usual_policy = "iwocs_member"

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        if not isinstance(policy, Member):
            raise ConfigError("learner=iwocs trains a member of a set: policy=iwocs_member")
        if config.n_step > 1:
            raise ConfigError("learner=iwocs predicts single steps: learner.n_step=1")
        super().__init__(config, policy, spec)
        self.actor_params = [*policy.actor_parameters]
        self.value_target = copy.deepcopy(policy.value).requires_grad_(False)
        self.value_params: list[Tensor] = [*policy.value.parameters()]
        self.value_target_params: list[Tensor] = [*self.value_target.parameters()]
        self.optims |= {
            "actor": Adam(self.actor_params, config.actor_lr),
            "value": Adam(self.value_params, config.critic_lr),
            "predictor": Adam(policy.predictor.parameters(), config.predictor_lr),
        }

    def _step(self, act: bool, batch: Tensors) -> dict[str, Tensor]:
        metrics = super()._step(act, batch)
        last = each(batch, lambda values: values[-self.config.batch_size :])
        value, error = self.value_loss(last), self.prediction_error(last)
        self.descend("value", value)
        soft_update(self.value_target_params, self.value_params, self.config.tau)
        self.descend("predictor", error)
        return metrics | {"value_loss": value.detach(), "prediction_error": error.detach()}

    def value_loss(self, batch: Tensors) -> Tensor:
        """The loss of the policy's values without an entropy bonus."""
        following = under(batch, "next_obs")
        with torch.no_grad():
            action, _ = draw(self.policy, following)
            value = self.value_target(following, action).amin(0)
            backup = batch["reward"] + batch["discount"] * value
        return critic_loss(self.policy.value(under(batch, "obs"), batch["action"]), backup)

    def prediction_error(self, batch: Tensors) -> Tensor:
        """The mean error of the predicted next observations."""
        flat = self.policy.encoder.flat
        before, after = flat(under(batch, "obs")), flat(under(batch, "next_obs"))
        return self.policy.error(before, batch["action"], after).mean()
