"""PPO for recurrent policies whose critic shares the policy's GRU: one network for both.

The critic is an MLP on the policy's hidden state, V(h), as in studies of partially observed mazes
(Jiang et al., 2021); the critic of `ppo` has a GRU of its own, which costs as much again. The GRU
is trained by both losses, so `value_weight` matters; the critic has no observations that the policy
has not.
"""

from __future__ import annotations

from torch import Tensor, nn

from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each, nest, under
from embodied.learners.critics import ValueConfig
from embodied.learners.on_policy.ppo import Before, Config, Ppo
from embodied.nn.networks import mlp, orthogonal
from embodied.policies.networks.encoders import Encoder
from embodied.policies.recurrent import Memory

__all__ = ["Config", "PpoShared"]


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

    def _critic(self, spec: Spec) -> SharedValue:
        if not hasattr(self.policy, "evaluate_memory"):
            raise ConfigError("learner=ppo_shared needs a recurrent policy: policy=recurrent")
        if self.config.value.obs is not None:
            raise ConfigError("value.obs has no effect with learner=ppo_shared: leave it out")
        return SharedValue(self.config.value, self.policy.memory)

    def _evaluate_recurrent(self, batch: Tensors, carry: Tensors) -> Before:
        h = self.policy.memory.along(under(batch, "obs"), carry["h"], batch["first"])
        flat = each(under(batch, "next_obs"), lambda leaf: leaf.flatten(0, 1))
        after = self.policy.memory(flat, h.flatten(0, 1)).view_as(h)
        old, _ = self.policy.evaluate_memory(h, under(batch, "obs"), batch["action"])
        return old, self.value(h), self.value(after), nest(carry, "carry")

    def _evaluate_minibatch(self, minibatch: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        obs = each(under(minibatch, "obs"), lambda leaf: leaf.transpose(0, 1))
        h = self.policy.memory.along(obs, minibatch["carry/h"], minibatch["first"].mT)
        action = minibatch["action"].transpose(0, 1)
        log_prob, entropy = self.policy.evaluate_memory(h, obs, action)
        return log_prob.mT, entropy.mT, self.value(h).mT

    def state_values(self, obs: Tensors) -> Tensor:
        begun = self.policy.memory.initial(len(next(iter(obs.values()))))
        return self.value(self.policy.memory(obs, begun)[None])[0]
