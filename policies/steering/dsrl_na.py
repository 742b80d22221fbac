"""DsrlNa: noise-aliased DSRL, whose stored actions are the executed chunks.

Many noise vectors lead to the same action, so the critic is trained on executed actions.
Transitions hold no noise, so demonstrations and other policies' data can be used too.
"""

from __future__ import annotations

from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, is_history, under, with_history
from embodied.policies.steering.dsrl import Config, Dsrl
from embodied.policies.steering.steered import Steered


class DsrlNa(Dsrl):
    """Acts as `Dsrl`; the learner gets the whole policy and executed chunks as actions."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        carried = self.base.initial(1)
        if not all(is_history(key) for key in carried):
            raise ConfigError("DSRL-NA needs a base policy without memory: use finetune=dsrl")
        self.has_history = bool(carried)

    def initial(self, n: int) -> Tensors:
        return Steered.initial(self, n)

    @property
    def augments(self) -> bool:
        return self.has_history

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        """With the base's past observations, so that a stored decision can be made again."""
        return with_history(obs, under(carry, "base")), carry

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        actions, carry = super().act(obs, carry, noise)
        return actions, {key: value for key, value in carry.items() if key != "row/action"}

    def play(self, obs: Tensors, u: Tensor) -> Tensor:
        """The base's chunks [n, H, A] for noise `u` [n, d] in units of the bound."""
        return self.base_act(obs, {}, self.base_noise(u))[0]

    def warmup_policy(self) -> Policy:
        """The base policy with its own noise; stored actions need not be within the bound."""
        return self.base

    def trainable(self) -> Policy:
        return self

    def with_trained(self, trained: Policy) -> Policy:
        return trained
