"""DERL: reward expressions from a small recurrent network that learns from how they were trained.

"Differentiable evolutionary reinforcement learning" (DERL, 2025) trains a language model to write
an arithmetic expression of atomic rewards, by group-relative policy gradients: the measure of the
policy that an expression trained is the expression's reward. Here a GRU over the tokens of the
expressions' grammar takes the model's place, and learns from nothing:

    A_i = (R_i - mean R) / std R over a round
    L = -mean over tokens of min(rho A_i, clip(rho, 1 - eps, 1 + eps) A_i) - c H

R_i is the score, moved to [0, 1] over the valid expressions of the round, and -1 for invalid ones.
rho is the probability of a token by that when the expression was drawn. After each token only those
may follow that keep the expression one of the grammar and end in time; a parser of our own reads it
(`embodied.rewards.handcrafted.expression`), and a program is written of its tree. Invalid is what
uses no primitive, is constant, or fails the checks of programs; what equals an earlier one up to a
positive factor and a constant is drawn again, as it trains the same policy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from embodied.core.bounds import Bound, Count, Fraction, NonNegative, Positive, Units
from embodied.core.build import ConfigError
from embodied.core.device import forked
from embodied.learners.on_policy.ppo_parts import clip_loss
from embodied.nn.optim import Adam, gradient_step
from embodied.reward_design.designer import Board, Designer, Proposal
from embodied.reward_design.designers.grammar import (
    NOTHING,
    NUMBER,
    PRIMITIVES,
    WAY,
    Kinds,
    Term,
    kinds,
    names_of,
    written,
)
from embodied.rewards.handcrafted import expression as tree

CONSTANTS = ("0.1", "0.3", "1", "3", "10")
OPERATORS = ("+", "-", "*", "/")
END = "end"
SCALES = {WAY: 0.2, NUMBER: 1.0, NOTHING: 1.0}
TESTED = 64  # random values of the primitives that expressions are compared at
FLAT = 1e-5  # standard deviation of a constant, of primitives between 0 and 1


@dataclass(frozen=True)
class Config:
    """Settings of DERL."""

    primitives: Count = 12  # atomic rewards; of more than that a random choice
    length: Annotated[int, Bound(1, 17)] = 13  # most tokens of an expression; 17 nest 8 deep
    draws: Count = 40  # expressions to check per proposal
    hidden: Units = 64  # units of the GRU
    lr: Fraction = 0.01  # Adam's learning rate; 0: random search
    passes: Count = 8  # gradient steps per round
    clip: Positive = 0.2  # eps
    entropy: NonNegative = 0.01  # c


class Tokens:
    """The tokens over primitives called `names`: which may follow which, and what they say."""

    def __init__(self, names: list[str], length: int) -> None:
        self.words = [*names, *CONSTANTS, *OPERATORS, "(", ")", END]
        self.primitives = len(names)
        self.length = length
        self.end = self.words.index(END)

    def allowed(self, tokens: list[int]) -> list[bool]:
        """Which tokens may follow `tokens`: an expression of at most `length` can result."""
        words = [self.words[token] for token in tokens]
        opened = words.count("(") - words.count(")")
        operand = not words or words[-1] in (*OPERATORS, "(")
        left = self.length - len(tokens) - 1

        def fits(word: str) -> bool:
            if word == END:
                return not operand and not opened
            if operand and word == "(":
                return left >= opened + 2
            if operand:
                return word not in (*OPERATORS, ")")
            if word == ")":
                return opened > 0
            return word in OPERATORS and left >= opened + 1

        return [fits(word) for word in self.words]

    def text(self, tokens: list[int], names: dict[int, str]) -> str:
        """The expression, with `names` for the primitives."""
        said = [names.get(token, self.words[token]) for token in tokens if token != self.end]
        return " ".join(said)


class Generator(nn.Module):
    """A GRU that gives the probabilities of the next token."""

    def __init__(self, tokens: Tokens, hidden: int) -> None:
        super().__init__()
        count = len(tokens.words)
        self.tokens = tokens
        self.embed = nn.Embedding(count + 1, hidden)  # the last one: before the first token
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, count)

    def logs(self, before: Tensor, allowed: Tensor) -> Tensor:
        """Log-probabilities [n, L, V] of the tokens after `before` [n, L], -inf if not allowed."""
        seen, _ = self.gru(self.embed(before))
        return self.head(seen).masked_fill(~allowed, -torch.inf).log_softmax(2)

    @torch.no_grad()
    def sample(self, chance: torch.Generator) -> list[int]:
        """An expression with its end."""
        drawn: list[int] = []
        while not drawn or drawn[-1] != self.tokens.end:
            allowed = torch.tensor([self.tokens.allowed(drawn)])
            before = torch.tensor([[len(self.tokens.words), *drawn]])
            logs = self.logs(before, allowed[:, None].expand(-1, before.shape[1], -1))[0, -1]
            drawn.append(int(torch.multinomial(logs.exp(), 1, generator=chance)))
        return drawn

    def evaluate(self, group: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities [n, L] of the tokens of expressions, entropies [n, L], and which of
        them [n, L] (bool) are not beyond an end."""
        longest = max(map(len, group))
        count = len(self.tokens.words)
        rows = torch.full((len(group), longest), self.tokens.end)
        allowed = torch.zeros(len(group), longest, count, dtype=torch.bool)
        allowed[..., self.tokens.end] = True
        for row, tokens in enumerate(group):
            rows[row, : len(tokens)] = torch.tensor(tokens)
            for at in range(len(tokens)):
                allowed[row, at] = torch.tensor(self.tokens.allowed(tokens[:at]))
        before = torch.cat([torch.full((len(group), 1), count), rows[:, :-1]], 1)
        logs = self.logs(before, allowed)
        entropy = -(logs.exp() * logs.masked_fill(~allowed, 0.0)).sum(2)
        lengths = torch.tensor([len(tokens) for tokens in group])
        real = torch.arange(longest) < lengths[:, None]
        return logs.gather(2, rows[..., None])[..., 0], entropy, real


def advantages(scores: list[float | None]) -> Tensor:
    """A [n] of a round's expressions, None: invalid; zeros where they are equally good."""
    known = torch.tensor([score for score in scores if score is not None], dtype=torch.float64)
    low, high = (known.amin(), known.amax()) if len(known) else (0.0, 0.0)
    wide = max(float(high - low), 1e-12)
    values = [-1.0 if score is None else (score - float(low)) / wide for score in scores]
    rewards = torch.tensor(values)
    return (rewards - rewards.mean()) / rewards.std(correction=0).clamp(min=1e-6)


def atomic(have: Kinds, count: int, seed: int) -> list[Term]:
    """Primitives of one argument, of everything that the environment offers; of more than `count`
    a random choice."""
    found: list[Term] = []
    for kind in have.usable():
        first, second = PRIMITIVES[kind].wants
        if second == NOTHING:
            scale = SCALES[first]
            found += [Term(kind, on, "", scale, scale, 1.0) for on in have.of(first)]
    if len(found) > count:
        chosen = random.Random(f"primitives:{seed}").sample(range(len(found)), count)
        found = [found[i] for i in sorted(chosen)]
    return found


class Derl(Designer):
    """The generator is trained anew from the journal for each round: it has no state."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def propose(self, board: Board, number: int, count: int) -> list[Proposal]:
        terms = atomic(kinds(board.variables), self.config.primitives, board.seed)
        if not terms:
            raise ConfigError("designer=derl finds no primitive in this environment")
        tokens = Tokens(names_of(terms), self.config.length)
        generator = self.trained(board, tokens, number)
        chance = torch.Generator().manual_seed(1_000 * board.seed + number)
        known = {str(c.origin.get("same")) for c in board.ledger.candidates.values()}
        return [self._one(board, terms, generator, chance, known) for _ in range(count)]

    def say(self, board: Board, number: int) -> str:
        """No comment: all information is in the journal."""
        return ""

    def trained(self, board: Board, tokens: Tokens, number: int) -> Generator:
        """The generator after the rounds before `number`."""
        with forked(board.seed):
            generator = Generator(tokens, self.config.hidden)
        if not self.config.lr:
            return generator
        adam = Adam(generator.parameters(), self.config.lr, local=True)
        for past in range(number):
            group: list[list[int]] = []
            scores: list[float | None] = []
            for candidate in board.ledger.of_round(past):
                invalid = candidate.origin.get("invalid", [])
                group += invalid
                scores += [None] * len(invalid)
                if "expression" in candidate.origin:
                    group.append(candidate.origin["expression"])
                    scores.append(candidate.fitness)
            if group:
                self.learn(generator, adam, group, advantages(scores))
        return generator

    def learn(
        self, generator: Generator, adam: Adam, group: list[list[int]], advantage: Tensor
    ) -> None:
        """`passes` steps on one round."""
        config = self.config
        with torch.no_grad():
            old, _, _ = generator.evaluate(group)
        for _ in range(config.passes):
            log_prob, entropy, real = generator.evaluate(group)
            loss, _ = clip_loss(log_prob, old, advantage[:, None].expand_as(old), config.clip)
            total = ((loss - config.entropy * entropy) * real).sum() / real.sum()
            gradient_step(adam, total)

    def _one(
        self,
        board: Board,
        terms: list[Term],
        generator: Generator,
        chance: torch.Generator,
        known: set[str],
    ) -> Proposal:
        """The first of `draws` expressions that is new and passes the checks."""
        invalid: list[list[int]] = []
        for _ in range(self.config.draws):
            drawn = generator.sample(chance)
            said, used = self.read(generator.tokens, drawn)
            same = sameness(said, names_of([terms[i] for i in used]), used)
            if same in known:
                continue
            source = written([terms[i] for i in used], tree.written(said)) if same else ""
            if not same or board.check(source).problem:
                invalid.append(drawn)
                continue
            known.add(same)
            origin: dict[str, Any] = {"designer": "derl", "expression": drawn, "invalid": invalid}
            return Proposal(source, origin | {"same": same})
        problem = f"{len(invalid)} expressions failed the gates"
        return Proposal(None, {"designer": "derl", "invalid": invalid}, problem)

    def read(self, tokens: Tokens, drawn: list[int]) -> tuple[tree.Expression, list[int]]:
        """The tree of an expression, over the names of the primitives that it uses, and these."""
        used = sorted({token for token in drawn if token < tokens.primitives})
        local = [f"{tokens.words[i].rpartition('_')[0]}_{place}" for place, i in enumerate(used)]
        text = tokens.text(drawn, dict(zip(used, local, strict=True)))
        return tree.parse(text, local), used


def sameness(said: tree.Expression, names: list[str], used: list[int]) -> str:
    """What expressions have in common that are equal up to a positive factor and a constant: their
    standardised values for random ones of the primitives; "" for a constant, and for what is not
    finite."""
    values = {
        name: torch.rand(TESTED, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        for name, i in zip(names, used, strict=True)
    }
    found = tree.evaluate(said, values)
    if not tree.names_in(said) or not bool(found.isfinite().all()) or float(found.std()) < FLAT:
        return ""
    shape = (found - found.mean()) / found.std()
    return " ".join(f"{value:.2f}" for value in (shape[:8] + 0.0).tolist())
