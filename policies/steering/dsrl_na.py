"""DSRL-NA: latent-noise RL whose stored actions are the executed chunks (noise-aliased).

DSRL's noise-aliased variant (Wagenmaker et al., 2025). Many noises lead to one action, so values
are learned of the action that was executed; rows then say nothing of noise, and demonstrations, or
what another policy has done, are as good as its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.moved import attributes
from policies.steering import dsrl
from policies.steering.steered import Steered


@dataclass(frozen=True)
class Config(dsrl.Config):
    """As of `policies.steering.dsrl`."""


class DsrlNa(dsrl.Dsrl):
    """Acts like Latent; learners are given all of it, and see executed chunks as the action."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        if self.base.initial(1):
            raise ConfigError(
                "values of executed actions need a base without memory: finetune=dsrl"
            )

    def initial(self, n: int) -> Tensors:
        return Steered.initial(self, n)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        actions, carry = super().act(obs, carry, noise)
        return actions, {key: value for key, value in carry.items() if key != "row/action"}

    def play(self, obs: Tensors, u: Tensor) -> Tensor:
        """The base's chunks [n, H, A] of noises `u` [n, d] in units of the bound."""
        return self.base_act(obs, {}, self.bound * u.view(-1, *self.noise_shape))[0]

    def warmup_policy(self) -> Policy:
        """The base with its own noise: what is stored does not have to be reachable."""
        return self.base

    def trainable(self) -> Policy:
        """All of it: the learner needs the base too."""
        return self

    def with_trained(self, trained: Policy) -> Policy:
        return trained


__getattr__ = attributes(__name__)
