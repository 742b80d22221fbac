"""Prompt-DT: decision transformers on lifetimes of many tasks (Xu et al., 2022); offline.

The data are recorded lifetimes (`Trials`), each with a task of its own. Of each sampled step the
next `length` steps of its episode are predicted, after a prompt from another episode of the same
lifetime, one of the `best` by return:

    minimise  mean_t |a_t - pi(prompt, a_{t-1} R_t s_t, ...)|^2

A share `promptless` of the sequences has no prompt, as the first episode in a new task has none.
The policy's target is the 0.9 quantile of the returns of the data's episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.bounds import Count, Fraction, NonNegative, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import FIRST
from embodied.core.tensors import Tensors, take, under
from embodied.datasets.transitions import EPISODE, PLACE
from embodied.learners.learner import Learner
from embodied.nn.optim import Adam
from embodied.policies import prompt_dt as policies

QUANTILE = 0.9  # of the returns of the data's episodes, which the policy asks for


@dataclass(frozen=True)
class Config:
    """Settings of Prompt-DT."""

    batch_size: Count = 128  # sequences per update
    length: Count = 20  # steps of a sequence, which ends with its episode
    best: Count = 3  # episodes of a lifetime that prompts are of
    promptless: Fraction = 0.25  # share of sequences without a prompt
    lr: PositiveFraction = 1e-3  # AdamW's learning rate
    weight_decay: NonNegative = 1e-4  # of AdamW
    grad_clip: Positive = 1.0  # largest norm of the gradient


@dataclass(frozen=True)
class Lifetimes:
    """Recorded steps [N, ...] in the order of time, and the inner episodes [E] that they are of."""

    steps: Tensors  # state (normalised), action, before (the last action), wanted (return to come)
    number: Tensor  # [N] the inner episode of each step
    start: Tensor  # [E] its first step
    length: Tensor  # [E] its number of steps
    returns: Tensor  # [E] its return
    ranked: Tensor  # [E, k + 1] the best k inner episodes of its lifetime, and the next one

    @property
    def end(self) -> Tensor:
        """[E] the step after the last one."""
        return self.start + self.length


class PromptDtLearner(Learner):
    """Each update is one AdamW step on the actions of sequences that follow a prompt."""

    data = "offline"
    usual_policy = "prompt_dt"
    extra_columns = (EPISODE, PLACE)
    lifetimes: Lifetimes

    def __init__(self, config: Config, policy: Policy) -> None:
        super().__init__(config, policy)
        if not isinstance(policy, policies.PromptDt):
            raise ConfigError(f"this learner trains policy={self.usual_policy}")
        own = [p for name, p in policy.named_parameters() if not name.startswith("context.")]
        self.optims["adam"] = Adam(own, config.lr, weight_decay=config.weight_decay, decoupled=True)

    def fit(self, transitions: Tensors) -> None:
        super().fit(transitions)
        self.lifetimes = self._read(transitions)
        returns = self.lifetimes.returns
        self.policy.target.copy_(returns.quantile(QUANTILE))
        self.policy.scale.copy_(returns.abs().max().clamp(min=1e-6))

    def _read(self, transitions: Tensors) -> Lifetimes:
        device = self.policy.scale.device
        obs = {name: leaf.to(device) for name, leaf in under(transitions, "obs").items()}
        reward = transitions["reward"].to(device).float()
        first = obs[FIRST][:, 0] > 0.5
        number = first.long().cumsum(0) - 1
        start = first.nonzero().flatten()
        length = number.bincount(minlength=len(start))
        # Sums over whole datasets are in double precision, as differences of them are taken.
        so_far = reward.double().cumsum(0) - reward
        returns = torch.zeros(len(start), dtype=torch.float64, device=device)
        returns = returns.index_add(0, number, reward.double())
        wanted = returns[number] - (so_far - so_far[start][number])
        steps = {
            "state": self.policy.encoder(obs),
            "action": transitions["action"].to(device).float(),
            "before": obs["last_action"] * (1 - obs[FIRST]),
            "reward": reward[:, None],
            "wanted": wanted.float(),
        }
        lifetime = transitions[EPISODE].to(device)[start]
        showable = torch.where(length > self.policy.config.prompt, returns, -torch.inf)
        ranked = self._ranked(lifetime, showable)
        return Lifetimes(steps, number, start, length, returns.float(), ranked)

    def _ranked(self, lifetime: Tensor, returns: Tensor) -> Tensor:
        """[E, best + 1]: of each inner episode the best ones of its `lifetime` [E] by `returns`
        [E], best first; where there are fewer the last one again."""
        by_return = returns.argsort(descending=True, stable=True)
        order = by_return[lifetime[by_return].argsort(stable=True)]
        _, group, count = lifetime[order].unique_consecutive(
            return_inverse=True, return_counts=True
        )
        begin = (count.cumsum(0) - count)[group]
        places = torch.arange(self.config.best + 1, device=order.device)
        places = begin[:, None] + torch.minimum(places, count[group][:, None] - 1)
        return order[places][order.argsort()]

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        return {"loss": self.descended("adam", self.loss(batch[PLACE]))}

    def descended(self, name: str, loss: Tensor) -> Tensor:
        """One step of the optimiser `name` on `loss`, which is returned without its graph."""
        loss.backward()
        parameters: list[Any] = self.optims[name].param_groups[0]["params"]
        distributed.average_gradients(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, self.config.grad_clip)
        self.optims[name].step()
        return loss.detach()

    def loss(self, place: Tensor) -> Tensor:
        """Mean squared error of the actions of the sequences from the steps `place` [B]."""
        known = self.lifetimes
        own = known.number[place]
        index = place[:, None] + torch.arange(self.config.length, device=place.device)
        valid = index < known.end[own][:, None]
        index = torch.where(valid, index, place[:, None])
        steps = take(known.steps, index.flatten())
        seen = self.described(steps["state"], index.flatten())
        tokens = self.policy.tokens(
            *(part.unflatten(0, index.shape) for part in (steps["before"], steps["wanted"], seen))
        )
        prompt, there = self.prompts(own)
        found = self.policy.along(prompt, there, tokens)
        error = (found - steps["action"].unflatten(0, index.shape)).square().mean(2)
        return (error * valid).sum() / valid.sum()

    def described(self, state: Tensor, place: Tensor) -> Tensor:
        """What the policy sees of states [n, S] at the steps `place` [n]."""
        return state

    def prompts(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Prompts [B, L, 1 + S + A] for inner episodes `own` [B], and where there are any [B]."""
        known = self.lifetimes
        best = known.ranked[own]
        pick = torch.randint(self.config.best, (len(own), 1), device=own.device)
        chosen = best.gather(1, pick)[:, 0]
        chosen = torch.where(chosen == own, best[:, -1], chosen)
        kept = torch.rand(len(own), device=own.device) >= self.config.promptless
        there = kept & (chosen != own) & (known.length[chosen] > self.policy.config.prompt)
        start = torch.where(there, self.segments(chosen), 0)
        index = start[:, None] + torch.arange(self.policy.config.prompt, device=own.device)
        steps = take(known.steps, index.flatten())
        parts = [steps["wanted"][:, None], steps["state"], steps["action"]]
        return torch.cat(parts, 1).unflatten(0, index.shape), there

    def segments(self, chosen: Tensor) -> Tensor:
        """The first step of the segment that is shown of the inner episodes `chosen` [B]: any."""
        known = self.lifetimes
        count = (known.length[chosen] - self.policy.config.prompt).clamp(min=1)
        lot = torch.rand(len(chosen), device=chosen.device)
        return known.start[chosen] + (lot * count).long().minimum(count - 1)
