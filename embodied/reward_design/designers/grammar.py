"""Grammar: reward programs without a language model, as evolving sums of typed primitives.

A baseline for language models as reward designers, which also works offline. Each round samples new
programs and mutates the best of earlier rounds: a constant component is replaced, the largest one
scaled down, constants and terms are changed, and two programs exchange terms. It uses the Spec, not
the sentence; programs that fail the checks are resampled.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from embodied.core.bounds import Count, Fraction
from embodied.reward_design.designer import Board, Designer, Proposal
from embodied.reward_design.designers.primitives import (
    SCALES,
    WEIGHTS,
    Kinds,
    Term,
    kinds,
    restored,
    sample_term,
    stored,
    written,
)
from embodied.reward_design.journal import Candidate
from embodied.reward_design.reflection import curves

STILL = 1e-3  # a component that moves less than this share of the largest one's size is constant


@dataclass(frozen=True)
class Config:
    """Settings of the grammar."""

    terms: Count = 4  # largest number of terms of a program
    draws: Count = 40  # programs to check per proposal
    fresh: Fraction = 0.25  # fraction of new programs once there are parents


class Grammar(Designer):
    """A round depends on the seed and the journal only."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def propose(self, board: Board, number: int, count: int) -> list[Proposal]:
        chance = random.Random(f"{board.seed}:{number}")
        parents = sorted(
            (c for c in board.ledger.candidates.values() if c.scores and "terms" in c.origin),
            key=lambda c: c.order,
            reverse=True,
        )[:3]
        have = kinds(board.variables)
        taken = {c.source for c in board.ledger.candidates.values()}
        return [self._one(board, have, parents, chance, taken) for _ in range(count)]

    def say(self, board: Board, number: int) -> str:
        """No comment: all information is in the journal."""
        return ""

    def _one(
        self,
        board: Board,
        have: Kinds,
        parents: list[Candidate],
        chance: random.Random,
        taken: set[str | None],
    ) -> Proposal:
        """The first of `draws` programs that passes the checks, or the last one with its
        problem."""
        refused = 0
        for _ in range(self.config.draws):
            terms, origin = self._sample(have, parents, chance)
            source = written(terms)
            if source in taken:
                continue
            verdict = board.check(source)
            if not verdict.problem:
                taken.add(source)
                origin |= {"terms": stored(terms), "refused_before": refused}
                return Proposal(source, origin)
            refused += 1
        return Proposal(None, {"designer": "grammar"}, f"{refused} programs failed the gates")

    def _sample(
        self, have: Kinds, parents: list[Candidate], chance: random.Random
    ) -> tuple[list[Term], dict[str, Any]]:
        origin: dict[str, Any] = {"designer": "grammar", "parents": []}
        if not parents or chance.random() < self.config.fresh:
            count = chance.randint(1, self.config.terms)
            return [sample_term(have, chance) for _ in range(count)], origin
        parent = chance.choice(parents)
        terms = improved(restored(parent.origin["terms"]), parent, have, chance)
        origin["parents"] = [parent.id]
        if len(parents) > 1 and chance.random() < 0.4:
            other = chance.choice([p for p in parents if p is not parent])
            terms = crossed(terms, restored(other.origin["terms"]), chance)[: self.config.terms]
            origin["parents"].append(other.id)
        else:
            terms = mutated(terms, have, chance)[: self.config.terms]
        return terms, origin


def improved(
    terms: list[Term], candidate: Candidate, have: Kinds, chance: random.Random
) -> list[Term]:
    """Apply what the components' statistics suggest: replace a constant one, scale down one that is
    ten times the next."""
    seen = curves(candidate)
    moved = {name: max(v) - min(v) for name, v in seen.items() if v and name != "total"}
    sizes = {name: max(map(abs, v)) for name, v in seen.items() if v and name != "total"}
    largest = max(sizes.values(), default=0.0)
    ranked = sorted(sizes.values(), reverse=True)
    result: list[Term] = []
    for number, term in enumerate(terms):
        name = f"{term.kind}_{number}"
        if name in moved and moved[name] < STILL * largest and chance.random() < 0.5:
            term = sample_term(have, chance)
        elif len(ranked) > 1 and sizes.get(name) == largest and largest > 10 * ranked[1]:
            term = replace(term, weight=term.weight / 3)
        result.append(term)
    return result


def mutated(terms: list[Term], have: Kinds, chance: random.Random) -> list[Term]:
    """One mutation: change a constant, add, remove or replace a term."""
    terms = list(terms)
    at = chance.randrange(len(terms))
    how = chance.choice(["weight", "scale", "level", "add", "drop", "new"])
    if how == "add":
        return [*terms, sample_term(have, chance)]
    if how == "drop" and len(terms) > 1:
        del terms[at]
        return terms
    choices = {
        "weight": lambda t: replace(t, weight=chance.choice(WEIGHTS)),
        "scale": lambda t: replace(t, scale=chance.choice(SCALES)),
        "level": lambda t: replace(t, level=chance.choice(SCALES)),
    }
    terms[at] = choices[how](terms[at]) if how in choices else sample_term(have, chance)
    return terms


def crossed(a: list[Term], b: list[Term], chance: random.Random) -> list[Term]:
    """Crossover: each term of both with probability 1/2; at least one."""
    kept = [term for term in [*a, *b] if chance.random() < 0.5]
    distinct = list(dict.fromkeys(kept))
    return distinct if distinct else [chance.choice([*a, *b])]


def drawn_at_random(variables: dict[str, Any], seed: int, terms: int = 4) -> str:
    """A random program of the grammar: the control without selection."""
    chance = random.Random(f"control:{seed}")
    have = kinds(variables)
    return written([sample_term(have, chance) for _ in range(chance.randint(1, terms))])
