"""Meta-DT: a decision transformer on latents of a context encoder (Wang et al., 2024); offline.

For `context_updates` updates the context encoder learns with a model of the environment, to predict
the reward and the next state of a step from the steps before it; then both stay as they are, and
the decision transformer learns as in Prompt-DT, on states with latents, and with the segments of
episodes as prompts that the model predicts worst, as the policy chooses them when it acts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.core.bounds import Count, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, take
from embodied.datasets.transitions import PLACE
from embodied.learners.offline import prompt_dt
from embodied.nn.optim import Adam
from embodied.policies.meta_dt import MetaDt

AT_ONCE = 4096  # steps that latents are computed of at once


@dataclass(frozen=True)
class Config(prompt_dt.Config):
    """Settings of Meta-DT: those of Prompt-DT, and of the context encoder."""

    context_updates: Count = 3000  # updates of the context encoder, which come first
    context_lr: PositiveFraction = 1e-3  # Adam's learning rate for it


class MetaDtLearner(prompt_dt.PromptDtLearner):
    """First updates of the context encoder, then of the transformer. `latents` [N, Z] and
    `surprising` [E], the first step of each inner episode's segment, are found between."""

    usual_policy = "meta_dt"
    counters = ("done",)

    def __init__(self, config: Config, policy: Policy) -> None:
        super().__init__(config, policy)
        if not isinstance(policy, MetaDt):
            raise ConfigError("Meta-DT trains policy=meta_dt")
        self.optims["context"] = Adam(policy.context.parameters(), config.context_lr)
        self.done = 0
        self.latents: Tensor | None = None
        self.surprising: Tensor | None = None

    def fit(self, transitions: Tensors) -> None:
        super().fit(transitions)
        reward = self.lifetimes.steps["reward"]
        self.policy.context.shift.copy_(reward.mean())
        self.policy.context.spread.copy_(reward.std().clamp(min=1e-6))
        self.latents = None

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.latents = None  # of other parameters

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        self.done += 1
        if self.done <= self.config.context_updates:
            reward, change = self.context_errors(batch[PLACE])
            self.descended("context", reward.mean() + change.mean())
            return {"loss": reward.detach().mean(), "change_error": change.detach().mean()}
        if self.latents is None:
            self._use_context()
        return super().update(batch)

    def context_errors(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """The model's squared errors [n] of the reward and of the next state after the steps
        `place` [n]; that of the state is 0 where the episode ends, as it is not seen."""
        known = self.lifetimes
        last = place + 1 == known.end[known.number[place]]
        following = known.steps["state"][torch.where(last, place, place + 1)]
        step = self._told(place)
        reward, change = self.policy.context.errors(self._latent(place), step, following)
        return torch.where(last, 0.0, reward), torch.where(last, 0.0, change)

    def _latent(self, place: Tensor) -> Tensor:
        """z [n, Z] at the steps `place` [n]."""
        known = self.lifetimes
        back = torch.arange(-self.policy.config.history, 0, device=place.device)
        index = place[:, None] + back
        within = index >= known.start[known.number[place]][:, None]
        steps = self._told(index.clamp(min=0).flatten()).unflatten(0, index.shape)
        return self.policy.context(steps * within[..., None])

    def _told(self, place: Tensor) -> Tensor:
        """Reward, state and action [n, 1 + S + A] of the steps `place` [n]."""
        steps = take(self.lifetimes.steps, place)
        return torch.cat([steps[name] for name in ("reward", "state", "action")], 1)

    @torch.no_grad()
    def _use_context(self) -> None:
        """Set `latents`, and of each inner episode the segment with the largest error."""
        known = self.lifetimes
        parts = torch.arange(len(known.number), device=known.number.device).split(AT_ONCE)
        self.latents = torch.cat([self._latent(part) for part in parts])
        errors = torch.cat([sum(self.context_errors(part), start=0 * part) for part in parts])
        length = self.policy.config.prompt
        sums = errors.unfold(0, length, 1).sum(1)  # of the segments from each step on
        start = torch.arange(len(sums), device=sums.device)
        episode = known.number[: len(sums)]
        fits = start + length < known.end[episode]  # without the last step, as in the policy
        sums = torch.where(fits, sums, -torch.inf)
        most = sums.new_full((len(known.start),), -torch.inf)
        most = most.scatter_reduce(0, episode, sums, "amax")
        is_most = (fits & (sums == most[episode])).nonzero().flatten()
        self.surprising = known.start.clone()
        self.surprising[episode[is_most].flip(0)] = is_most.flip(0)  # of equal ones the first

    def described(self, state: Tensor, place: Tensor) -> Tensor:
        assert self.latents is not None
        return torch.cat([state, self.latents[place]], 1)

    def segments(self, chosen: Tensor) -> Tensor:
        assert self.surprising is not None
        return self.surprising[chosen]
