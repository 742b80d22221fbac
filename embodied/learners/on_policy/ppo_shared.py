"""PPO for recurrent policies whose critic shares the policy's GRU: one network for both.

The critic is an MLP on the policy's hidden state, V(h), as in studies of partially observed mazes
(Jiang et al., 2021); the critic of `ppo` has a GRU of its own, which costs as much again. The GRU
is trained by both losses, so `value_weight` matters; the critic has no observations that the policy
has not.
"""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor, nn

from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each, nest, under
from embodied.learners.critics import Value, ValueConfig
from embodied.learners.on_policy.ppo import Before, Config, Ppo
from embodied.nn.networks import mlp, orthogonal
from embodied.policies.networks.encoders import Encoder
from embodied.policies.recurrent import Memory

__all__ = ["Config", "PpoShared"]


class MemoryPolicy(Protocol):
    """A recurrent policy that evaluates actions by its hidden states, which `memory` computes."""

    memory: Memory

    def evaluate_memory(
        self, memory: Tensor, obs: Tensors, action: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [T, B] of actions taken at `obs` [T, B, ...] with `memory`
        [T, B, width]."""
        ...


class SharedValue(nn.Module):
    """V [T, B] of a policy's hidden states [T, B, width]. `encoder` is the policy's: not a part of
    this module."""

    def __init__(self, config: ValueConfig, memory: Memory) -> None:
        super().__init__()
        self.net = mlp(memory.width, config.hidden, 1, config.activation, config.layer_norm)
        orthogonal(self.net, config.head)
        self._encoders = (memory.encoder,)

    @property
    def encoder(self) -> Encoder:
        return self._encoders[0]

    def forward(self, memory: Tensor) -> Tensor:
        return self.net(memory.flatten(0, 1)).view(memory.shape[:2])


class PpoShared(Ppo):
    """As Ppo; ConfigError for a policy without memory, and for observations of the critic's own."""

    usual_policy = "recurrent"

    def _critic(self, spec: Spec) -> Value:
        if not hasattr(self.policy, "evaluate_memory"):
            raise ConfigError("learner=ppo_shared needs a recurrent policy: policy=recurrent")
        if self.config.value.obs is not None:
            raise ConfigError("value.obs has no effect with learner=ppo_shared: leave it out")
        return cast(Value, SharedValue(self.config.value, self.actor.memory))

    @property
    def actor(self) -> MemoryPolicy:
        return cast(MemoryPolicy, self.policy)

    def _evaluate_recurrent(self, batch: Tensors, carry: Tensors) -> Before:
        h = self.actor.memory.along(under(batch, "obs"), carry["h"], batch["first"])
        flat = each(under(batch, "next_obs"), lambda leaf: leaf.flatten(0, 1))
        after = self.actor.memory(flat, h.flatten(0, 1)).view_as(h)
        old, _ = self.actor.evaluate_memory(h, under(batch, "obs"), batch["action"])
        return old, self._value(h), self._value(after), nest(carry, "carry")

    def _evaluate_minibatch(self, minibatch: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        obs = each(under(minibatch, "obs"), lambda leaf: leaf.transpose(0, 1))
        h = self.actor.memory.along(obs, minibatch["carry/h"], minibatch["first"].mT)
        action = minibatch["action"].transpose(0, 1)
        log_prob, entropy = self.actor.evaluate_memory(h, obs, action)
        return log_prob.mT, entropy.mT, self._value(h).mT

    def state_values(self, obs: Tensors) -> Tensor:
        begun = self.actor.memory.initial(len(next(iter(obs.values()))))
        return self._value(self.actor.memory(obs, begun)[None])[0]

    def _value(self, memory: Tensor) -> Tensor:
        return cast(SharedValue, self.value)(memory)
