"""ASAF: adversarial soft advantage fitting, imitation by a discriminator that is the policy (2020).

Barde et al. "Adversarial soft advantage fitting: imitation learning without policy optimization"
(2020). The discriminator of windows w of W steps is made of the likelihoods of the policy pi that
is trained and of the policy pi_G that acted:

    D(w) = P_pi(w) / (P_pi(w) + P_G(w)) = sigmoid(sum_t log pi(a_t|s_t) - log pi_G(a_t|s_t))
    L    = -E_demonstrations log D(w) - E_own log(1 - D(w))

Its optimum is the demonstrator's policy, so that fitting D is the step of the policy: no reward is
learned, and no RL follows. W = 1 is the paper's ASAF-1, W of a whole episode its ASAF.

Differences from the paper: windows begin at every step and are shorter at the end of an episode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from embodied.core import distributed
from embodied.core.bounds import Count, NonNegative, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, each, take, to, under
from embodied.datasets.transitions import EPISODE
from embodied.learners.learner import Learner
from embodied.learners.on_policy.ppo import shuffled
from embodied.learners.on_policy.ppo_parts import ObservationStats, StochasticPolicy, clip_norm
from embodied.nn.optim import Adam


@dataclass(frozen=True)
class Config:
    """Settings of ASAF. A batch has `horizon` decisions of every parallel environment."""

    horizon: Count = 256  # decisions of each parallel environment per update
    epochs: Count = 10  # passes over the own windows of a batch
    batch_size: Count = 64  # windows per minibatch, own ones and as many demonstrated
    window: Count = 1  # steps of a window; 1: ASAF-1, a whole episode: ASAF
    lr: PositiveFraction = 3e-4  # Adam's learning rate
    grad_clip: NonNegative = 1.0  # largest norm of the gradient; 0: no limit
    normalize: bool = True  # normalise observations by running statistics


@dataclass(frozen=True)
class Windows:
    """Windows of M starts over N decisions, `obs/*` and `action` [N, ...]: `index` [M, W] of their
    steps, and which of them (`mask` [M, W], bool) are of the same episode as the start."""

    decisions: Tensors
    index: Tensor
    mask: Tensor


class Asaf(Learner):
    """`update` makes `epochs` passes over the windows of a batch [T, B] of the current policy's
    decisions. Rewards are not used."""

    data = "on_policy"
    usual_policy = "diagonal_gaussian"
    extra_columns: tuple[str, ...] = (EPISODE,)
    counters = ("begun",)

    def __init__(self, config: Config, policy: Policy) -> None:
        super().__init__(config, policy)
        if not isinstance(policy, StochasticPolicy) or policy.chunk > 1:
            raise ConfigError(
                "learner=asaf needs a policy of single actions with log-probabilities: "
                "policy=diagonal_gaussian or policy=categorical"
            )
        self.weights = [p for p in self.policy.parameters() if p.requires_grad]
        self.optims = {"policy": Adam(self.weights, config.lr)}
        self.stats = ObservationStats(self.policy.encoder)
        self.shown: Windows | None = None
        self.begun = False

    def set_demonstrations(self, demonstrations: Tensors) -> None:
        """Set the transitions, in the order of time: `obs/*`, `action`, `episode` [N, ...]."""
        here = to(demonstrations, self.weights[0].device)
        self.shown = windows(here, here[EPISODE][:, None], self.config.window)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        if self.shown is None:
            raise ConfigError("learner=asaf imitates demonstrations: demos=DIR")
        valid = batch["valid"]
        if not self.begun and not self.stats.given:  # a new policy hardly depends on observations
            self._observe(batch)
        ended = batch["ended"].long()
        run = torch.where(valid, ended.cumsum(0) - ended, -1)
        decisions = {k: v for k, v in batch.items() if k == "action" or k.startswith("obs/")}
        flat = each(decisions, lambda leaf: leaf.flatten(0, 1))
        own = windows(flat, run, self.config.window)
        old = self._log_probs(own.decisions)
        old_shown = self._log_probs(self.shown.decisions)
        seen: list[Tensors] = []
        size = min(self.config.batch_size, valid.numel())
        for _ in range(self.config.epochs):
            order = shuffled(len(own.index), size, valid.device)
            for at in range(0, len(order) - size + 1, size):
                mine = self.log_ratio(own, old, order[at : at + size])
                chosen = torch.randint(len(self.shown.index), (size,), device=valid.device)
                seen.append(self._step(mine, self.log_ratio(self.shown, old_shown, chosen)))
        if self.begun:
            self._observe(batch)
        self.begun = True
        return {key: torch.stack([metrics[key] for metrics in seen]).mean() for key in seen[0]}

    def _observe(self, batch: Tensors) -> None:
        """Update the running statistics of observations from a batch."""
        if self.config.normalize:
            obs = each(under(batch, "obs"), lambda leaf: leaf.flatten(0, 1))
            self.stats.follow(self.policy.encoder, obs, batch["valid"].flatten())

    @torch.no_grad()
    def _log_probs(self, decisions: Tensors) -> Tensor:
        """Log-probabilities [N] by the parameters that acted."""
        return self.policy.evaluate_actions(under(decisions, "obs"), decisions["action"])[0]

    def log_ratio(self, among: Windows, old: Tensor, chosen: Tensor) -> Tensor:
        """log P_pi(w) - log P_G(w) of the windows `chosen` [n]; `old` [N]: log pi_G."""
        index = among.index[chosen]
        steps = take(among.decisions, index.flatten())
        new, _ = self.policy.evaluate_actions(under(steps, "obs"), steps["action"])
        change = (new - old[index.flatten()]).view_as(index)
        return (change * among.mask[chosen]).sum(1)

    def _step(self, own: Tensor, shown: Tensor) -> dict[str, Tensor]:
        """A gradient step on the log ratios of own and of demonstrated windows, both [n]."""
        loss = self._loss(own, shown)
        loss.backward()
        if self.config.grad_clip:
            distributed.average_gradients(self.weights)
            clip_norm([weight.grad for weight in self.weights], self.config.grad_clip)
        self.optims["policy"].step()
        return {
            "loss": loss.detach(),
            "own": own.detach().sigmoid().mean(),
            "shown": shown.detach().sigmoid().mean(),
        }

    def _loss(self, own: Tensor, shown: Tensor) -> Tensor:
        return softplus(-shown).mean() + softplus(own).mean()


def windows(decisions: Tensors, run: Tensor, size: int) -> Windows:
    """Windows of up to `size` steps from every decision of the flattened grid [T, B]; `run` [T, B]
    is the number of the episode of each (of each column; negative: padding)."""
    kept = {k: v for k, v in decisions.items() if k == "action" or k.startswith("obs/")}
    steps, envs = run.shape
    flat = run.flatten()
    starts = (flat >= 0).nonzero()
    index = starts + envs * torch.arange(size, device=run.device)
    inside = index < steps * envs
    index = index.clamp(max=steps * envs - 1)
    return Windows(kept, index, inside & (flat[index] == flat[starts]))
