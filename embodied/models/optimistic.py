"""MEX, model-based (Liu et al., 2023): Dyna whose model is tilted towards what the critics value.

    L = NLL - kappa E[ A log p(x | s, a) ],   a ~ pi(.|s),   x = (s', r) ~ p(.|s, a)
    A = r + d min_i Q_i(s', a') - min_i Q_i(s, a),   standardised over the batch,   a' ~ pi(.|s')

Neither x nor A has a gradient: outcomes that are worth more than others become more likely, as far
as the recorded transitions allow. kappa = 0 is Dyna. Differences from the published code: one
optimiser step for the sum of both terms; a predicted termination does not end the value of s'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.buffers.replay import ReplayBuffer
from embodied.core.bounds import NonNegative
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.models import dyna
from embodied.models.dyna import Dyna
from embodied.models.ensemble import MlpEnsemble, Rows


@dataclass(frozen=True)
class Config(dyna.Config):
    """Settings of imagined updates in an optimistic model."""

    kappa: NonNegative = 1e-3  # weight of the optimism beside the model's likelihood; 0: Dyna


class OptimisticDyna(Dyna):
    """As Dyna. `critic`: of observations [N, ...] and actions [N, A], Q-values [n, N]."""

    config: Config

    def __init__(
        self,
        config: Config,
        replay: ReplayBuffer,
        policy: Policy,
        gamma: float,
        device: torch.device,
        critic: Any,
    ) -> None:
        super().__init__(config, replay, policy, gamma, device)
        if not isinstance(self.model, MlpEnsemble):
            raise ConfigError(
                "an optimistic model has a likelihood: embodied.models.ensemble.MlpEnsemble"
            )
        if getattr(critic, "out", 0) != 1:
            raise ConfigError("an optimistic model needs critics of one number: learner=sac")
        self.critic = critic
        if config.kappa:
            self.model.further_loss = self.tilt

    def tilt(self, batch: Rows) -> Tensor:
        """The term [E] of each network's loss, at the states of transitions [E, n]."""
        model = self.model
        assert isinstance(model, MlpEnsemble)
        with torch.no_grad():
            obs = model.unflat(batch.x[..., : model.size].flatten(0, 1))
            action = self._act(obs)
            x = model.inputs(obs, action).unflatten(0, batch.ended.shape)
        mean, log_var, _ = model(x)
        with torch.no_grad():
            drawn = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
            out = (drawn * model.scale + model.shift).flatten(0, 1)
            there = (model.flat(obs) + out[:, :-1]).clamp(model.low, model.high)
            following = model.unflat(there)
            after = self.critic(following, self._act(following)).amin(0)
            gain = out[:, -1] + self.gamma * after - self.critic(obs, action).amin(0)
            gain = (gain - gain.mean()) / gain.std(correction=0).clamp(min=1e-6)
        likelihood = -0.5 * ((drawn - mean).square() * (-log_var).exp() + log_var).sum(2)
        return -self.config.kappa * (likelihood * gain.view_as(likelihood)).mean(1)
