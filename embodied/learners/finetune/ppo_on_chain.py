"""PPO on the denoising MDP of a generative policy: DPPO and ReinFlow.

The policy (embodied.policies.denoising_mdp.chain) stores the denoising chain of each decision as
its action. States, rewards and advantages are those of whole decisions (action chunks).

**DPPO** (Ren et al., 2024), on the last denoising steps of a diffusion policy. Each denoising step
is an action with its own probability ratio. All steps of a decision share its advantage A; earlier,
noisier steps have a smaller weight and a smaller clip range. For k = 0 .. K-1

    rho_k  = exp(mean over elements of log p(x_{k+1}|x_k, o) - log p_old(x_{k+1}|x_k, o))
    A_k    = g^(K-1-k) A,      eps_k = e_0 + (e_1 - e_0) (exp(c k / (K-1)) - 1) / (exp(c) - 1)
    L      = E[ -min(rho_k A_k, clip(rho_k, 1 - eps_k, 1 + eps_k) A_k) ] + c_v E[(V(s) - R)^2] / 2

Minibatches are shuffled over time, environments and denoising steps. A is computed per decision by
generalised advantage estimation, which bootstraps from the true next observation at a time limit.
Differences from the published code: it normalises A within each minibatch (here: `advantage`, by
default over the batch), and ends its warm-up of the critic after a number of environment steps.

**ReinFlow** (Zhang et al., 2025), on the Euler steps of a flow policy. With learned noise on each
of K Euler steps (embodied.policies.denoising_mdp.noisy_flow), the chain x_0 .. x_K has an exact
density. Each decision has one probability ratio, that of its whole chain:

    l     = (log N(x_0; 0, I) + sum_k log N(x_{k+1}; mean_k, std_k)) / ((K + 1) elements)
    rho   = exp(l - l_old)
    L     = PPO's, with the entropy of the chain, divided likewise,  + w |ODE(z) - ODE_base(z)|^2

The division makes the clip range and the entropy weight independent of K and the chunk length.
`narrow`: the noise's upper bound is constant for the share `hold` of the run, then decreases along
a cosine by 0.3 of the distance to the lower bound. After training the flow acts without noise.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, cast

import torch
from torch import Tensor

from embodied.core.bounds import (
    Bound,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Number,
    Positive,
    PositiveFraction,
)
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each, under
from embodied.learners.critics import Value, ValueConfig
from embodied.learners.learner import RunPlan
from embodied.learners.on_policy import ppo
from embodied.learners.on_policy.ppo import PIECE, piece
from embodied.learners.on_policy.ppo_parts import clip_loss, normalized, value_loss
from embodied.policies.denoising_mdp.chain import DenoisingMDP
from embodied.policies.denoising_mdp.noisy_flow import NoisyFlow

WIDE = ValueConfig((256, 256), "mish")
FALL = 0.3  # of the way from the upper bound of ReinFlow's noise to the lower


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
    separate = True  # for updates of the critic only

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        if not isinstance(policy, DenoisingMDP):
            raise ConfigError(
                "this learner fine-tunes the denoising steps of a base policy: set init=RUN and "
                "policy=noisy_flow or policy=noisy_diffusion"
            )
        super().__init__(config, policy, spec, run)
        self.part = self.played
        self.played = None  # the network needs all of x
        self.updates = 0

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


@dataclass(frozen=True)
class DppoConfig(Config):
    """Settings of DPPO; `clip` is the clip range of the last denoising step."""

    first_clip: Positive = 0.01  # clip range of the first denoising step
    growth: Positive = 3.0  # c: how late the clip range grows from `first_clip` to `clip`
    fade: Fraction = 0.99  # g: discount of the advantage per earlier denoising step
    limits: tuple[Number, Number] = (-5.0, 2.0)  # bounds of the log-density of each element


class Dppo(PpoOnChain):
    """DPPO: PPO with one probability ratio per denoising step."""

    clips: Tensor
    fades: Tensor

    def __init__(self, config: DppoConfig, policy: Policy, spec: Spec, run: RunPlan) -> None:
        super().__init__(config, policy, spec, run)
        links = self.policy.links
        clips = clip_schedule(links, config.first_clip, config.clip, config.growth)
        fades = config.fade ** torch.arange(links - 1.0, -1.0, -1.0)
        self.register_buffer("clips", clips, persistent=False)
        self.register_buffer("fades", fades, persistent=False)

    @torch.no_grad()
    def _table(self, batch: Tensors, carry: Tensors) -> tuple[Tensors, dict[str, Tensor]]:
        """Flatten decisions to denoising steps [N * K, ...]: `action` is the pair (x_k, x_{k+1}),
        `step` is k."""
        decisions, metrics = super()._table(batch, carry)
        chain = decisions.pop("action")
        links = self.policy.links
        del decisions["old"]
        table = each(decisions, lambda leaf: leaf.repeat_interleave(links, 0))
        table["action"] = torch.stack([chain[:, :-1], chain[:, 1:]], 2).flatten(0, 1)
        table["step"] = torch.arange(links, device=chain.device).repeat(len(chain))
        places = range(0, len(table["step"]), PIECE)
        pieces = (each(table, partial(piece, at, PIECE)) for at in places)
        table["old"] = torch.cat([self._evaluate_actions(part)[0] for part in pieces])
        return table, metrics

    def _old(self, decisions: Tensors) -> Tensor:
        """Nothing yet: `_table` computes log-densities per denoising step."""
        return torch.zeros_like(decisions["reward"])

    def _evaluate_actions(self, minibatch: Tensors) -> tuple[Tensor, Tensor]:
        """Log-densities [N] of single denoising steps, averaged over elements; entropies are
        reported as 0, as the noise is not learned."""
        x, following = minibatch["action"].unbind(1)
        each_element = self.policy.log_prob(
            under(minibatch, "obs"), x, following, minibatch["step"]
        )
        part = self.policy.executed(self.part)
        log_prob = each_element[:, part].clamp(*self.config.limits).mean(1)
        return log_prob, torch.zeros_like(log_prob)

    def _loss(self, minibatch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a minibatch of denoising steps, and the metrics."""
        log_prob, _ = self._evaluate_actions(minibatch)
        advantage = minibatch["advantage"]
        clip = self.clips[minibatch["step"]]
        if self.config.advantage == "minibatch":
            advantage = normalized(advantage, torch.full_like(advantage, 1 / len(advantage)))
        advantage = advantage * self.fades[minibatch["step"]]
        policy_loss, log_ratio = clip_loss(log_prob, minibatch["old"], advantage, clip)
        error = value_loss(self._values(minibatch), minibatch["target"])
        loss = policy_loss.mean() + self.config.value_weight * error.mean()
        with torch.no_grad():
            ratio = log_ratio.exp()
            parts = {
                "policy_loss": policy_loss.mean(),
                "value_loss": error.mean(),
                "kl": (ratio - 1 - log_ratio).mean(),  # Schulman's third estimator
                "clipped": ((ratio - 1).abs() > clip).float().mean(),
            }
        return loss, parts


def clip_schedule(links: int, first: float, last: float, growth: float) -> Tensor:
    """Clip ranges eps_k [links], growing exponentially from `first` to `last`; a single denoising
    step gets `last`."""
    if links == 1:
        return torch.tensor([last])
    share = torch.expm1(growth * torch.arange(links) / (links - 1)) / math.expm1(growth)
    return first + (last - first) * share


@dataclass(frozen=True)
class ReinflowConfig(Config):
    """Settings of ReinFlow. The authors' `limits` are -1 and 1, which noise below 0.05 exceeds."""

    entropy: NonNegative = 0.03  # weight of the entropy bonus
    limits: tuple[Number, Number] = (-5.0, 5.0)  # bounds of a chain's log-density
    stay: NonNegative = 0.0  # w: weight of the squared distance to the base's noise-free actions
    narrow: bool = False  # anneal the upper bound of the noise
    hold: Annotated[float, Bound(0.0, below=1.0)] = 0.35  # share of the run before annealing


class Reinflow(PpoOnChain):
    """ReinFlow: PPO with one probability ratio per denoising chain."""

    def __init__(self, config: ReinflowConfig, policy: Policy, spec: Spec, run: RunPlan) -> None:
        super().__init__(config, policy, spec, run)
        if not isinstance(policy, NoisyFlow):
            raise ConfigError("learner=reinflow needs policy=noisy_flow (or finetune=reinflow)")
        if config.narrow and not run.decisions:
            raise ConfigError("narrow=true anneals over the run: it needs the length of the run")
        self.clone = copy.deepcopy(policy.inner).requires_grad_(False) if config.stay else None

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        metrics = super().update(batch)
        if self.config.narrow:  # here, because noise may change only between batches
            bound = 1 - FALL * fallen(self.done / self.total, self.config.hold)
            cast(NoisyFlow, self.policy).narrow(bound)
        return metrics

    def _evaluate_actions(self, minibatch: Tensors) -> tuple[Tensor, Tensor]:
        log_prob, entropy = self.policy.evaluate_actions(
            under(minibatch, "obs"), minibatch["action"], self.part
        )
        return log_prob.clamp(*self.config.limits), entropy

    def _loss(self, minibatch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super()._loss(minibatch)
        if self.clone is None:
            return loss, metrics
        left = self.left(under(minibatch, "obs"), torch.randn_like(minibatch["action"][:, 0]))
        return loss + self.config.stay * left, metrics | {"left_clone": left.detach()}

    def left(self, obs: Tensors, z: Tensor) -> Tensor:
        """Squared distance [n] of the flow's actions to the base policy's at the same noise `z`."""
        assert self.clone is not None, "stay > 0 needs the base policy"
        apart = self.policy.inner.act(obs, {}, z)[0] - self.clone.act(obs, {}, z)[0]
        return apart.square().mean()


def fallen(progress: float, hold: float) -> float:
    """0 for `hold` of the run, then along a cosine to 1 at its end."""
    past = min(max(progress - hold, 0.0) / (1 - hold), 1.0)
    return 0.5 - 0.5 * math.cos(math.pi * past)
