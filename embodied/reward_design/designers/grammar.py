"""Grammar: reward programs without a language model, as sums of typed primitives that evolve.

A baseline for language models as reward designers, and what the search runs with on a closed
machine. A round draws new programs and changes the best of the rounds before: a component that was
constant over training is replaced, the largest one is scaled down, numbers and parts are changed,
and two programs exchange terms. It knows the Spec, not the sentence; a draw that fails the gates is
drawn again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from embodied.reward_design.designer import Board, Proposal
from embodied.reward_design.designers.primitives import (
    SCALES,
    WEIGHTS,
    Kinds,
    Term,
    draw,
    kinds,
    restored,
    stored,
    written,
)
from embodied.reward_design.journal import Candidate
from embodied.reward_design.reflection import curves

STILL = 1e-3  # a component that moves less than this share of the largest one's size is constant


@dataclass(frozen=True)
class Config:
    """`terms` at most; `draws`: programs tried at the gates for each that is proposed; `fresh`: the
    share of a round that is drawn anew once there are parents."""

    terms: int = 4
    draws: int = 40
    fresh: float = 0.25


class Grammar:
    """A round depends on the seed and the ledger only."""

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
        """Nothing: the ledger has it all."""
        return ""

    def _one(
        self,
        board: Board,
        have: Kinds,
        parents: list[Candidate],
        chance: random.Random,
        taken: set[str | None],
    ) -> Proposal:
        """The first of `draws` programs that passes the gates, or the last one with its problem."""
        refused = 0
        for _ in range(self.config.draws):
            terms, origin = self._drawn(have, parents, chance)
            source = written(terms)
            if source in taken:
                continue
            verdict = board.judge(source)
            if not verdict.problem:
                taken.add(source)
                origin |= {"terms": stored(terms), "refused_before": refused}
                return Proposal(source, origin)
            refused += 1
        return Proposal(None, {"designer": "grammar"}, f"{refused} programs failed the gates")

    def _drawn(
        self, have: Kinds, parents: list[Candidate], chance: random.Random
    ) -> tuple[list[Term], dict[str, Any]]:
        origin: dict[str, Any] = {"designer": "grammar", "parents": []}
        if not parents or chance.random() < self.config.fresh:
            count = chance.randint(1, self.config.terms)
            return [draw(have, chance) for _ in range(count)], origin
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
    """What the components' statistics advise: replace one that is constant, scale down one that is
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
            term = draw(have, chance)
        elif len(ranked) > 1 and sizes.get(name) == largest and largest > 10 * ranked[1]:
            term = replace(term, weight=term.weight / 3)
        result.append(term)
    return result


def mutated(terms: list[Term], have: Kinds, chance: random.Random) -> list[Term]:
    """One change: a number of a term, a new term, a term less, a term anew."""
    terms = list(terms)
    at = chance.randrange(len(terms))
    how = chance.choice(["weight", "scale", "level", "add", "drop", "new"])
    if how == "add":
        return [*terms, draw(have, chance)]
    if how == "drop" and len(terms) > 1:
        del terms[at]
        return terms
    choices = {
        "weight": lambda t: replace(t, weight=chance.choice(WEIGHTS)),
        "scale": lambda t: replace(t, scale=chance.choice(SCALES)),
        "level": lambda t: replace(t, level=chance.choice(SCALES)),
    }
    terms[at] = choices[how](terms[at]) if how in choices else draw(have, chance)
    return terms


def crossed(a: list[Term], b: list[Term], chance: random.Random) -> list[Term]:
    """Terms of both, each with an even chance; never none."""
    kept = [term for term in [*a, *b] if chance.random() < 0.5]
    distinct = list(dict.fromkeys(kept))
    return distinct if distinct else [chance.choice([*a, *b])]


def drawn_at_random(variables: dict[str, Any], seed: int, terms: int = 4) -> str:
    """One program of the grammar, as it comes: the control that no choice has touched."""
    chance = random.Random(f"control:{seed}")
    have = kinds(variables)
    return written([draw(have, chance) for _ in range(chance.randint(1, terms))])
