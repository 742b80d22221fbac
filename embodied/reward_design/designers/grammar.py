"""Grammar: reward programs without a language model, as evolving sums of typed primitives.

A baseline for language models as reward designers, which also works offline. Each round samples new
programs and mutates the best of earlier rounds: a constant component is replaced, the largest one
scaled down, constants and terms are changed, and two programs exchange terms. It uses the Spec, not
the sentence; programs that fail the checks are resampled.

Programs sum typed primitives over the environment's variables. A displacement is a vector of the
Spec (goal_from_tool) or the difference of two positions; a scalar is a single element, or the
height of a position. Each primitive is defined by its code; its constants are sampled.
"""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from embodied.core.bounds import Count, Fraction
from embodied.reward_design.designer import Board, Candidate, Designer, Proposal
from embodied.reward_design.prompts import curves
from embodied.rewards.handcrafted.program import NEXT, Variable

SCALES = (0.03, 0.05, 0.1, 0.2, 0.4)  # m, for distances
WEIGHTS = (0.1, 0.3, 1.0, 3.0, 10.0)
WAY, NUMBER, NOTHING = "way", "number", "nothing"

STILL = 1e-3  # a component that moves less than this share of the largest one's size is constant


@dataclass(frozen=True)
class Term:
    """`weight` times the primitive `kind` of `on` (and `to`, if it has two arguments), with `scale`
    and `level`."""

    kind: str
    on: str
    to: str
    scale: float
    level: float
    weight: float


@dataclass(frozen=True)
class Primitive:
    """`wants`: types of `on` and `to`; `code` over {on}, {to}, {before} (before the step), {scale}
    and {level}."""

    wants: tuple[str, str]
    code: str


PRIMITIVES: dict[str, Primitive] = {
    "near": Primitive((WAY, NOTHING), "1 - torch.tanh(size({on}) / {scale})"),
    "close": Primitive((WAY, NOTHING), "torch.exp(-size({on}) / {scale})"),
    "far": Primitive((WAY, NOTHING), "-size({on}) / {scale}"),
    "nearer": Primitive((WAY, NOTHING), "(size({before}) - size({on})) / {scale}"),
    "met": Primitive((WAY, NOTHING), "(size({on}) < {level}).float()"),
    "behind": Primitive((WAY, WAY), "1 - torch.tanh(size({on} - {level} * along({to})) / {scale})"),
    "after": Primitive(
        (WAY, WAY), "torch.exp(-size({on}) / {scale}) * (1 - torch.tanh(size({to}) / {scale}))"
    ),
    "high": Primitive((NUMBER, NOTHING), "(({on} - {level}) / {scale}).clamp(0, 1)"),
    "low": Primitive((NUMBER, NOTHING), "(({level} - {on}) / {scale}).clamp(0, 1)"),
    "more": Primitive((NUMBER, NOTHING), "{on} / {scale}"),
    "still": Primitive((NUMBER, NOTHING), "-{on}.square() / {scale}"),
    "held": Primitive((WAY, NUMBER), "((size({on}) < 0.03) & ({to} < {level})).float()"),
    "effort": Primitive((NOTHING, NOTHING), "-action.float().square().mean(dim=-1)"),
}
HELPERS = {
    "size": "def size(v):\n    return torch.norm(v, dim=-1)\n",
    "along": "def along(v):\n    return v / (torch.norm(v, dim=-1, keepdim=True) + 0.000001)\n",
    "ratio": "def ratio(a, b):\n    return a / torch.where(b.abs() < 0.000001, 0.000001, b)\n",
}


@dataclass(frozen=True)
class Kinds:
    """The displacements and scalars of an environment as code, with the variables they use."""

    ways: tuple[str, ...]
    numbers: tuple[str, ...]
    continuous: bool

    def of(self, kind: str) -> tuple[str, ...]:
        return {WAY: self.ways, NUMBER: self.numbers, NOTHING: ("",)}[kind]

    def usable(self) -> list[str]:
        """Primitives whose arguments exist."""
        usable = [k for k, p in PRIMITIVES.items() if all(self.of(want) for want in p.wants)]
        if len(self.ways) < 2:
            usable = [k for k in usable if PRIMITIVES[k].wants != (WAY, WAY)]
        return usable if self.continuous else [k for k in usable if k != "effort"]


def kinds(variables: dict[str, Variable]) -> Kinds:
    """The arguments that an environment offers. Displacements of the Spec are preferred to
    differences."""
    points = [v.name for v in variables.values() if v.is_point]
    ways = [name for name in points if "_from_" in name]
    if not ways:
        ways = [f"{a} - {b}" for i, a in enumerate(points) for b in points[i + 1 :]]
    numbers = [f"{name}[:, 2]" for name in points if "_from_" not in name]
    for v in variables.values():
        if v.name == "action" or v.dtype != "float32":
            continue
        if v.shape == ():
            numbers.append(v.name)
        elif v.at is None and len(v.shape) == 1 and not v.names:
            numbers += [f"{v.name}[:, {i}]" for i in range(min(v.shape[0], 16))]
    return Kinds(tuple(ways), tuple(numbers), variables["action"].dtype == "float32")


def sample_term(kinds: Kinds, chance: random.Random) -> Term:
    """A random term."""
    kind = chance.choice(kinds.usable())
    on, to = (chance.choice(kinds.of(want)) for want in PRIMITIVES[kind].wants)
    if PRIMITIVES[kind].wants == (WAY, WAY):
        to = chance.choice([way for way in kinds.ways if way != on])
    return Term(kind, on, to, chance.choice(SCALES), chance.choice(SCALES), chance.choice(WEIGHTS))


def names_of(terms: list[Term]) -> list[str]:
    """The names of terms in a program."""
    return [f"{term.kind}_{number}" for number, term in enumerate(terms)]


def written(terms: list[Term], total: str = "") -> str:
    """The program that returns `total`, Python over the terms' names ("": their sum); each term is
    a component with its own name."""
    lines: list[str] = []
    names = names_of(terms)
    total = total or " + ".join(names)
    used = {helper for helper in HELPERS if f"{helper}(" in total}
    for name, term in zip(names, terms, strict=True):
        before = term.on
        on, to = after(term.on), after(term.to)
        code = PRIMITIVES[term.kind].code.format(
            on=_held(on), to=_held(to), before=_held(before), scale=term.scale, level=term.level
        )
        used |= {helper for helper in HELPERS if f"{helper}(" in code}
        lines.append(f"    {name} = {term.weight:g} * ({code})")
    body = "\n".join(lines)
    asked = _asked(body, terms)
    parts = ", ".join(f'"{name}": {name}' for name in names)
    helpers = "\n\n".join(HELPERS[name] for name in sorted(used))
    head = f"{helpers}\n\n" if helpers else ""
    return f"{head}def reward({', '.join(asked)}):\n{body}\n    return {total}, {{{parts}}}\n"


def after(code: str) -> str:
    """The same expression after the step."""
    return " ".join(f"{NEXT}{w}" if w[:1].isalpha() else w for w in code.split(" "))


def _held(code: str) -> str:
    return f"({code})" if " - " in code else code


def _asked(body: str, terms: list[Term]) -> list[str]:
    """The parameters of a program, in order of appearance."""
    names: dict[str, None] = {}
    for term in terms:
        for code in (term.on, term.to):
            for word in code.replace("[:, ", " ").replace("]", " ").split():
                if word.isidentifier():
                    for name in (word, NEXT + word):
                        if _mentions(body, name):
                            names[name] = None
    if _mentions(body, "action"):
        names["action"] = None
    return list(names)


def _mentions(body: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", body) is not None


def stored(terms: list[Term]) -> list[dict[str, Any]]:
    """Terms as the journal stores them."""
    return [asdict(term) for term in terms]


def restored(data: list[dict[str, Any]]) -> list[Term]:
    return [Term(**term) for term in data]


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
            if not board.check(source).problem:
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
