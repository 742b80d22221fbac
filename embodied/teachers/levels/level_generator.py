"""LevelGenerator: an autoregressive policy that writes a level token by token; trained by PPO.

The adversary of PAIRED (Dennis et al., 2020); PPO: Schulman et al., 2017. For a level of T tokens
w_t whose episode return for the generator is g:

    delta_t = gamma V_{t+1} - V_t,  delta_T = g - V_T,  A_t = sum_k (gamma lambda)^k delta_{t+k}
    L = E[ -min(rho A, clip(rho, 1 - eps, 1 + eps) A) + c_v (V - V_old - A)^2 - c_h H ]

Its observation is the set of tokens so far and their number. The first `marks` tokens each have a
meaning of their own; the order of the others does not matter, so no recurrence is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embodied.core.bounds import Count, Fraction, NonNegative, Positive
from embodied.nn.fit import gradient_step
from embodied.teachers.torch_teacher import linear, mlp

Words = NDArray[np.int64]


@dataclass(frozen=True)
class Grammar:
    """Levels of `length` T tokens out of `words` V; the last token means nothing (never a mark)."""

    words: int
    length: int
    marks: int


@dataclass(frozen=True)
class Settings:
    """PPO settings of the level generator."""

    lr: Positive = 1e-3  # Adam's learning rate
    epochs: Count = 5  # gradient steps on the whole batch
    gamma: Fraction = 0.995  # discount per token
    lam: Fraction = 0.95  # lambda of GAE
    clip: Positive = 0.2  # clip range of the probability ratio
    value_weight: NonNegative = 0.5  # weight of the value loss
    entropy: NonNegative = 0.005  # weight of the entropy bonus
    width: Count = 64  # units of the hidden layers


class LevelGenerator(nn.Module):
    """Log-probabilities of the next token and a value, given the tokens so far."""

    def __init__(self, grammar: Grammar, width: int, random: np.random.Generator) -> None:
        super().__init__()
        self.grammar = grammar
        size = (grammar.marks + 1) * grammar.words + 1
        self.trunk = nn.Sequential(mlp((size, width, width), random, nn.Tanh), nn.Tanh())
        # Nearly uniform token probabilities at first.
        self.word = linear(width, grammar.words, random, 0.01)
        self.worth = linear(width, 1, random)

    def forward(self, seen: Tensor, t: Tensor | int) -> tuple[Tensor, Tensor]:
        """Log-probabilities [..., V] of word `t` (counted from 0) and values [...]."""
        hidden = self.trunk(seen)
        logits = self.word(hidden)
        nothing = torch.zeros(self.grammar.words)
        nothing[-1] = -torch.inf
        marks = torch.as_tensor(t < self.grammar.marks)[..., None]
        logits = torch.where(marks, logits + nothing, logits)
        return logits.log_softmax(-1), self.worth(hidden)[..., 0]

    def observations(self, words: Tensor) -> Tensor:
        """Observations before each of the tokens [n, T]: [n, T, (marks + 1) V + 1]."""
        grammar = self.grammar
        n, length = words.shape
        said = nn.functional.one_hot(words, grammar.words).float()
        shown = torch.zeros(n, length, (grammar.marks + 1), grammar.words)
        for mark in range(grammar.marks):
            shown[:, mark + 1 :, mark] = said[:, mark : mark + 1]
        rest = said[:, grammar.marks : -1].cumsum(1).clamp(max=1)
        shown[:, grammar.marks + 1 :, grammar.marks] = rest
        clock = (torch.arange(length) / length).expand(n, length)[..., None]
        return torch.cat([shown.flatten(2), clock], 2)

    @torch.no_grad()
    def generate(self, n: int, random: np.random.Generator) -> tuple[Words, Tensor, Tensor]:
        """n levels: tokens, their log-probabilities and the values before them, [n, T] each."""
        grammar = self.grammar
        lots = torch.from_numpy(random.random((grammar.length, n))).float()
        seen, rows = torch.zeros(n, (grammar.marks + 1) * grammar.words + 1), torch.arange(n)
        words = []
        logs = []
        values = []
        for t in range(grammar.length):
            seen[:, -1] = t / grammar.length
            log, value = self(seen, t)
            edge = log.exp().cumsum(1)
            word = (lots[t, :, None] * edge[:, -1:] >= edge).sum(1).clamp(max=grammar.words - 1)
            # At a mark the last word has no width, and rounding must not give it any.
            word = word.clamp(max=grammar.words - 2) if t < grammar.marks else word
            seen[rows, min(t, grammar.marks) * grammar.words + word] = 1
            words.append(word)
            logs.append(log[rows, word])
            values.append(value)
        return torch.stack(words, 1).numpy(), torch.stack(logs, 1), torch.stack(values, 1)


def advantages(value: Tensor, earned: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages [n, T] (GAE) of tokens with values [n, T]; `earned` [n] is the final reward."""
    following = torch.cat([gamma * value[:, 1:], earned[:, None]], 1)
    delta = following - value
    out, ahead = torch.empty_like(delta), torch.zeros_like(earned)
    for t in reversed(range(delta.shape[1])):
        ahead = delta[:, t] + gamma * lam * ahead
        out[:, t] = ahead
    return out


def surrogate(log: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """PPO's clipped surrogate loss, elementwise."""
    ratio = (log - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def improve(
    builder: LevelGenerator,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    words: Words,
    old: Tensor,
    value: Tensor,
    earned: Tensor,
) -> dict[str, float]:
    """PPO update on levels [n, T] of `generate` with rewards `earned` [n]; numbers to log."""
    raw = advantages(value, earned, settings.gamma, settings.lam)
    target, advantage = raw + value, normal(raw)
    said = torch.from_numpy(words)
    seen, clock = builder.observations(said), torch.arange(said.shape[1])
    entropy = torch.zeros(())
    for _ in range(settings.epochs):
        logs, values = builder(seen, clock)
        log = logs.gather(2, said[..., None])[..., 0]
        entropy = -(logs.exp() * logs.clamp(min=-100)).sum(2).mean()
        loss = surrogate(log, old, advantage, settings.clip).mean()
        loss = loss + settings.value_weight * (values - target).square().mean()
        gradient_step(optimizer, loss - settings.entropy * entropy)
    return {"entropy": float(entropy.detach())}


def normal(values: Tensor) -> Tensor:
    """Standardised values; zeros if all are equal."""
    centred = values - values.mean()
    return centred / (centred.square().mean().sqrt() + 1e-8)
