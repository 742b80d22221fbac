"""Tabular: an agent with tables for each parallel environment, and the rule by which it learns.

For studies of learned update rules (Oh et al., 2020): agent i of parallel environment i has in each
state s the logits of its actions, pi_i(.|s), and of a prediction vector y_i(s), a categorical
distribution over m classes whose meaning the rule gives it. The rule is a network that is the same
for all agents; it reads a rollout backwards,

    (g_t, u_t) = head(h_t)
    h_t = GRU(h_{t+1}, [r_t, d_t, pi(a_t|s_t), e(y_t), (1 - d_t) e(y_{t+1})])

with e a small network, d_t whether the episode ended, g_t a number, u_t the logits of the target of
y(s_t). `embodied.learners.on_policy.groove` trains it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embodied.core.bounds import Count, Units
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec, hidden
from embodied.core.tensors import Tensors

EMBEDDED = 16  # hidden units of e


@dataclass(frozen=True)
class Config:
    """Settings of agents with tables."""

    agents: Count = 1  # as many as there are parallel environments
    classes: Count = 8  # m, of the prediction vector
    width: Units = 64  # units of the rule's GRU


class Rule(nn.Module):
    """The learned update rule."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(classes, EMBEDDED), nn.ReLU(), nn.Linear(EMBEDDED, 1))
        self.gru = nn.GRU(5, width)
        self.head = nn.Linear(width, 1 + classes)

    def forward(
        self, reward: Tensor, ended: Tensor, chance: Tensor, y: Tensor, next_y: Tensor
    ) -> tuple[Tensor, Tensor]:
        """g [T, B] and u [T, B, m], of a rollout's `reward`, `ended` (bool) and `chance` of its
        actions [T, B], and the prediction vectors (probabilities) [T, B, m] before and after."""
        over = ended.float()
        before, after = self.embed(y).squeeze(2), self.embed(next_y).squeeze(2) * (1 - over)
        seen = torch.stack([reward, over, chance, before, after], 2)
        hidden, _ = self.gru(seen.flip(0))
        g, u = self.head(hidden.flip(0)).split([1, y.shape[2]], 2)
        return g.squeeze(2), u


class Tabular(Policy):
    """Noise [n, actions] is standard Gumbel to explore, zero for the most likely action. Row i is
    acted on by agent i modulo `agents`. A state is what is observed as symbols; the rest is not
    used."""

    logits: Tensor
    predictions: Tensor

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.config = config
        act = spec.act
        if act.is_continuous or act.shape != ():
            raise ConfigError("policy=tabular needs one choice among actions")
        seen = {name: leaf for name, leaf in spec.obs.items() if not hidden(name)}
        self.names = sorted(name for name, leaf in seen.items() if leaf.is_symbol)
        if not self.names:
            raise ConfigError("policy=tabular needs observations that are symbols")
        self.counts = [count for name in self.names for count in spec.obs[name].symbols]
        states = torch.tensor(self.counts).prod().item()
        if states > 100_000:
            raise ConfigError(f"policy=tabular: {states} states are too many for a table")
        shape = config.agents, int(states)
        self.register_buffer("logits", torch.zeros(*shape, act.choices[0]))
        self.register_buffer("predictions", torch.zeros(*shape, config.classes))
        self.rule = Rule(config.classes, config.width)

    def state(self, obs: Tensors) -> Tensor:
        """The number of the state [...] of observations [..., shape]."""
        lead = obs[self.names[0]].ndim - len(self.spec.obs[self.names[0]].shape)
        seen = torch.cat([obs[name].flatten(lead).long() for name in self.names], -1)
        number = torch.zeros_like(seen[..., 0])
        for digit, count in zip(seen.unbind(-1), self.counts, strict=True):
            number = number * count + digit
        return number

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        noise = torch.zeros(n, self.logits.shape[2], device=self.logits.device)
        return noise.exponential_().log_().neg_() if explore else noise

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        agent = torch.arange(len(noise), device=noise.device) % self.config.agents
        chosen = (self.logits[agent, self.state(obs)] + noise).argmax(1)
        return chosen[:, None], carry
