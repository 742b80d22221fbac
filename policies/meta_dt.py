"""MetaDt: a decision transformer that is told the task by a context encoder (Wang et al., 2024).

As `PromptDt`, with the latent z_t of the last `history` steps of the episode beside each state,

    z_t = W GRU(f(s) f(a) f(r) of steps t - h .. t - 1)

and with a self-guided prompt: of each of its own episodes the segment that a model of the
environment, which was given z_t, predicts worst. `learner=meta_dt` trains encoder and model, by

    |r_t - r(s_t, a_t, s_{t+1}, z_t)|^2 + |s_{t+1} - s(s_t, a_t, z_t)|^2.

Differences from the published code: both errors count, whatever differs between tasks; the segment
is the one with the largest error, not drawn by it; what a test task has shown is forgotten with the
lifetime.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count
from embodied.core.spec import Spec
from embodied.nn.networks import mlp
from embodied.policies import prompt_dt
from embodied.policies.networks import blocks
from embodied.policies.prompt_dt import REWARD, PromptDt

EMBEDDING = 16  # units of each of state, action and reward in the context encoder


@dataclass(frozen=True)
class Config(prompt_dt.Config):
    """Settings of Meta-DT: those of PromptDt, and of the context encoder."""

    history: Count = 4  # steps of a context
    latent: Count = 16  # elements of z
    memory: Count = 128  # units of the encoder's GRU, and of the model's hidden layers


class Context(nn.Module):
    """The context encoder, and the model that it is trained by; rewards are standardised."""

    shift: Tensor
    spread: Tensor

    def __init__(self, config: Config, size: int, actions: int) -> None:
        super().__init__()
        self.sizes = [1, size, actions]
        self.embed = nn.ModuleList(nn.Linear(k, EMBEDDING) for k in self.sizes)
        self.cell = nn.GRUCell(3 * EMBEDDING, config.memory)
        self.project = nn.Linear(config.memory, config.latent)
        known = size + actions + config.latent
        hidden = (config.memory, config.memory)
        self.reward = mlp(known + size, hidden, 1)
        self.change = mlp(known, hidden, size)
        self.register_buffer("shift", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))

    def forward(self, steps: Tensor) -> Tensor:
        """z [n, Z] of contexts [n, h, 1 + S + A] of reward, state and action."""
        reward, state, action = steps.split(self.sizes, 2)
        parts = ((reward - self.shift) / self.spread, state, action)
        embedded = [torch.relu(e(part)) for e, part in zip(self.embed, parts, strict=True)]
        cell = self.cell
        x = functional.linear(torch.cat(embedded, 2).transpose(0, 1), cell.weight_ih, cell.bias_ih)
        start = x.new_zeros(x.shape[1], cell.hidden_size)
        keep = torch.ones_like(x[..., :1])
        unroll = blocks.unroll_gru_cpu if x.device.type == "cpu" else blocks.unroll_gru
        return self.project(unroll(x, start, keep, cell.weight_hh, cell.bias_hh)[-1])

    def errors(self, z: Tensor, step: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """Squared errors [n] of the reward and of the state `following` [n, S] (their mean) that a
        `step` [n, 1 + S + A] led to."""
        reward, state, action = step.split(self.sizes, 1)
        known = torch.cat([state, action, z], 1)
        reward = (reward - self.shift) / self.spread
        found = self.reward(torch.cat([known, following], 1))
        change = (state + self.change(known) - following).square().mean(1)
        return (found - reward)[:, 0].square(), change


class MetaDt(PromptDt):
    """`PromptDt` with z beside states, whose prompts are what its model of the task predicts worst.
    Decisions do not depend on the noise."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.remembered = max(config.prompt, config.history)
        self.context = Context(config, self.size, self.actions)

    @staticmethod
    def latent_size(config: Config) -> int:
        return config.latent

    def described(self, state: Tensor, recent: Tensor) -> Tensor:
        return torch.cat([state, self.context(self._context(recent))], 1)

    def surprise(self, recent: Tensor, step: Tensor, following: Tensor, lot: Tensor) -> Tensor:
        z = self.context(self._context(recent))
        return sum(self.context.errors(z, step[:, REWARD:], following), start=0 * lot)

    def _context(self, recent: Tensor) -> Tensor:
        """The last `history` steps [n, h, 1 + S + A]; zeros before the start of the episode."""
        return recent[:, -self.config.history :, REWARD:]
