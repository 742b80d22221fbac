"""PpoOnChain: PPO on the denoising MDP of a generative policy; base class of DPPO and ReinFlow.

The policy (embodied.policies.denoising_mdp.chain) stores the denoising chain of each decision as
its action. States, rewards and advantages are those of whole decisions (action chunks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from embodied.core.bounds import (
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    PositiveFraction,
)
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each, under
from embodied.learners.critics import Value, ValueConfig
from embodied.learners.learner import UNPLANNED, RunPlan
from embodied.learners.on_policy import ppo
from embodied.nn.optim import Adam
from embodied.policies.denoising_mdp.chain import DenoisingMDP

WIDE = ValueConfig((256, 256), "mish")


@dataclass(frozen=True)
class Config(ppo.Config):
    """Settings of PPO on a denoising chain. `normalize` is of the critic's observations only; the
    policy keeps the normalisers of its base policy."""

    horizon: Count = 16  # decisions of each parallel environment per update
    epochs: Count = 5  # passes over a batch
    batch_size: Count = 512  # decisions (dppo: denoising steps) per minibatch
    clip: Positive = 0.01  # eps: largest change of the probability ratio that is rewarded
    lr: PositiveFraction = 1e-4  # Adam's learning rate of the policy
    critic_lr: Fraction = 1e-3  # Adam's learning rate of the value function; 0: the policy's
    grad_clip: NonNegative = 25.0  # largest norm of the gradient; 0: no limit
    advantage: Literal["minibatch", "batch", "raw"] = "batch"  # where it is normalised
    scale_rewards: bool = True  # divide rewards by the running std of the discounted return
    value: ValueConfig = WIDE  # the value function
    warm_up: CountOrZero = 1  # critic-only updates before the first policy update


class PpoOnChain(ppo.Ppo):
    """PPO over denoising chains; `part`: elements of each x that were executed (None: all)."""

    counters = ("updates",)
    policy: DenoisingMDP  # pyright: ignore[reportIncompatibleVariableOverride]
    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self, config: Config, policy: Policy, spec: Spec, run: RunPlan = UNPLANNED
    ) -> None:
        if not isinstance(policy, DenoisingMDP):
            raise ConfigError(
                "this learner fine-tunes the denoising steps of a base policy: set init=RUN and "
                "policy=noisy_flow or policy=noisy_diffusion"
            )
        super().__init__(config, policy, spec, run)
        self.part = self.played
        self.played = None  # the network needs all of x
        self.updates = 0
        if len(self.optims) == 1:  # critic-only updates need separate optimisers
            actor = [p for p in policy.parameters() if p.requires_grad]
            groups = {"actor": actor, "critic": list(self.value.parameters())}
            self.optims = {name: Adam(g, config.lr, eps=ppo.EPS) for name, g in groups.items()}

    def _critic(self, spec: Spec) -> Value:
        value = Value(self.config.value, spec)
        clone = self.policy.encoder
        if clone is not None and value.encoder.vectors == clone.vectors:
            value.encoder.norm.load_state_dict(clone.norm.state_dict())
        return value

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        metrics = super().update(batch)
        self.updates += 1
        return metrics

    def _set_rates(self) -> None:
        self.lr.active[0] = float(self.updates >= self.config.warm_up)
        super()._set_rates()

    def _observe(self, batch: Tensors) -> None:
        """Update only the critic's normaliser; the policy keeps that of its base policy."""
        if self.config.normalize:
            obs = each(under(batch, "obs"), lambda leaf: leaf.flatten(0, 1))
            self.critic_stats.follow(self.value.encoder, obs, batch["valid"].flatten())
