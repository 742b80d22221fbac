"""StagedCategorical: a Q-network of its own for each step of an episode (SQIRL, 2023).

    a_t = argmax_a Q_t(o_t, a)       in the first `trained` steps
    a_t uniform                      in later steps, to explore
    a_t = argmax_a Q_n(o_t, a)       in later steps without exploration, n the last trained step

`learner=sqirl` trains one network after another, beginning with the first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied.core.bounds import Count, Units
from embodied.core.build import ConfigError
from embodied.core.choices import Choices
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.nn.networks import Ensemble, affine
from embodied.policies.categorical import FORBIDDEN
from embodied.policies.encoded import EncodedConfig, EncodedPolicy


@dataclass(frozen=True)
class Config(EncodedConfig):
    """Settings of a policy with a network for each step."""

    steps: Count = 50  # networks; the last one is used in later steps too
    hidden: tuple[Units, ...] = (64, 64)  # units of the hidden layers
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "relu"  # of the hidden layers


class StagedCategorical(EncodedPolicy):
    """Noise [n, actions]: standard Gumbel to explore, otherwise zero. The carry has the number
    `step` of the decision in its episode; transitions have it too."""

    trained: Tensor

    def __init__(self, config: Config, spec: Spec) -> None:
        choices = Choices(spec)
        if len(choices.counts) != 1 or choices.numbers:
            raise ConfigError("this policy makes one choice per step: it needs discrete actions")
        if config.chunk > 1:
            raise ConfigError(f"this policy decides in every step: chunk=1, not {config.chunk}")
        super().__init__(config, spec)
        self.choices = choices
        self.actions = choices.most
        sizes = (config.steps, self.encoder.size, config.hidden, self.actions)
        self.net = Ensemble(*sizes, activation=config.activation)
        self.register_buffer("trained", torch.zeros((), dtype=torch.int64))

    def initial(self, n: int) -> Tensors:
        start = torch.zeros(n, dtype=torch.int64, device=self.trained.device)
        return {"step": start, "row/step": start}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        noise = torch.zeros(n, self.actions, device=self.trained.device)
        return noise.exponential_().log_().neg_() if explore else noise

    def values(self, obs: Tensors, step: Tensor) -> Tensor:
        """Q-values [n, actions] of observations in the steps `step` [n] of their episodes."""
        place = torch.minimum(step, (self.trained - 1).clamp(min=0))
        x = self.encoder(obs).unsqueeze(1)
        last = len(self.net.weights) - 1
        for i in range(last + 1):
            parts = (self.net.weights[i], self.net.biases[i])
            x = affine(x, *(part.index_select(0, place) for part in parts))
            x = self.net.activate(x) if i < last else x
        return x.squeeze(1)

    def allowed(self, obs: Tensors) -> Tensor:
        """Which actions may be chosen, [n or 1, actions] (bool)."""
        return self.choices.allowed(obs).reshape(-1, self.actions)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        step = carry["step"]
        explores = noise.abs().sum(1) > 0
        random = explores & (step >= self.trained)
        score = torch.where(random[:, None], noise, self.values(obs, step))
        choice = score.masked_fill(~self.allowed(obs), FORBIDDEN).argmax(1)
        action = self.choices.join(choice[:, None, None], noise.new_zeros(len(noise), 1, 0))
        return action, {**carry, "step": step + 1, "row/step": step}
