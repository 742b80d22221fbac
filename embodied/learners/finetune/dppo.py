"""DPPO: PPO on the last denoising steps of a diffusion policy (Ren et al., 2024).

Each denoising step is an action with its own probability ratio. All steps of a decision share its
advantage A; earlier, noisier steps have a smaller weight and a smaller clip range. For k = 0 .. K-1

    rho_k  = exp(mean over elements of log p(x_{k+1}|x_k, o) - log p_old(x_{k+1}|x_k, o))
    A_k    = g^(K-1-k) A,      eps_k = e_0 + (e_1 - e_0) (exp(c k / (K-1)) - 1) / (exp(c) - 1)
    L      = E[ -min(rho_k A_k, clip(rho_k, 1 - eps_k, 1 + eps_k) A_k) ] + c_v E[(V(s) - R)^2] / 2

Minibatches are shuffled over time, environments and denoising steps. A is computed per decision by
generalised advantage estimation, which bootstraps from the true next observation at a time limit.
Differences from the published code: it normalises A within each minibatch (here: `advantage`, by
default over the batch), and ends its warm-up of the critic after a number of environment steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from embodied.core.bounds import Fraction, Number, Positive
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each, under
from embodied.learners.finetune import ppo_on_chain
from embodied.learners.learner import RunPlan
from embodied.learners.on_policy.ppo import PIECE, piece
from embodied.learners.on_policy.ppo_parts import clip_loss, normalized, value_loss


@dataclass(frozen=True)
class Config(ppo_on_chain.Config):
    """Settings of DPPO; `clip` is the clip range of the last denoising step."""

    first_clip: Positive = 0.01  # clip range of the first denoising step
    growth: Positive = 3.0  # c: how late the clip range grows from `first_clip` to `clip`
    fade: Fraction = 0.99  # g: discount of the advantage per earlier denoising step
    limits: tuple[Number, Number] = (-5.0, 2.0)  # bounds of the log-density of each element


class Dppo(ppo_on_chain.PpoOnChain):
    """DPPO: PPO with one probability ratio per denoising step."""

    clips: Tensor
    fades: Tensor

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        if config.entropy:
            raise ConfigError("entropy has no effect with learner=dppo, whose noise is not learned")
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
        each_element = self.policy.link_log_prob(
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
