"""Arithmetic of named numbers, as a tree: parsed, evaluated on tensors and written by own code.

    sum      product { (+ | -) product }
    product  factor { (* | /) factor }
    factor   NUMBER | NAME | - factor | ( sum )

Nothing is ever given to Python's `eval`. A part without names is replaced by its number. A
denominator nearer to 0 than SMALL is taken as SMALL, so that a quotient is finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.build import ConfigError, nearest

WORD = re.compile(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|[A-Za-z_]\w*|[-+*/()])")
SMALL = 1e-6
DEPTH = 8
"""Largest number of operations and signs inside of each other."""


@dataclass(frozen=True)
class Constant:
    value: float


@dataclass(frozen=True)
class Named:
    name: str


@dataclass(frozen=True)
class Operation:
    """`sign`: one of + - * /."""

    sign: str
    left: Expression
    right: Expression


Expression = Constant | Named | Operation


class Parser:
    """Reads one expression over `names`; ConfigError says where the text is none."""

    def __init__(self, text: str, names: Collection[str]) -> None:
        self.text = text
        self.names = names
        self.words: list[str] = []
        at = 0
        while at < len(text.rstrip()):
            found = WORD.match(text, at)
            if found is None:
                raise self.wrong(f'"{text[at:].strip()[:10]}"')
            self.words.append(found[1])
            at = found.end()
        self.at = 0

    def wrong(self, what: str) -> ConfigError:
        return ConfigError(f'the expression "{self.text[:80]}" has {what} where it may not stand')

    @property
    def word(self) -> str:
        """The next word, "" at the end."""
        return self.words[self.at] if self.at < len(self.words) else ""

    def take(self) -> str:
        word = self.word
        self.at += 1
        return word

    def whole(self) -> Expression:
        """The expression of all words."""
        found = self.sum(0)
        if self.word:
            raise self.wrong(f'"{self.word}"')
        if depth(found) > DEPTH:
            raise ConfigError(f"the expression is deeper than {DEPTH} operations")
        return found

    def sum(self, inside: int) -> Expression:
        found = self.product(inside)
        while self.word in ("+", "-"):
            found = joined(self.take(), found, self.product(inside))
        return found

    def product(self, inside: int) -> Expression:
        found = self.factor(inside)
        while self.word in ("*", "/"):
            found = joined(self.take(), found, self.factor(inside))
        return found

    def factor(self, inside: int) -> Expression:
        """`inside`: of how many brackets and signs."""
        if inside > DEPTH:
            raise ConfigError(f"the expression is deeper than {DEPTH} operations")
        word = self.take()
        if word == "(":
            found = self.sum(inside + 1)
            if self.take() != ")":
                raise self.wrong("an open bracket")
            return found
        if word == "-":
            return joined("-", Constant(0.0), self.factor(inside + 1))
        if word[:1].isdigit():
            return Constant(float(word))
        if word.isidentifier():
            if word not in self.names:
                raise ConfigError(f'the expression has no "{word}"{nearest(word, self.names)}')
            return Named(word)
        raise self.wrong(f'"{word}"' if word else "its end")


def parse(text: str, names: Collection[str]) -> Expression:
    """The tree of `text` over `names`; ConfigError."""
    found = Parser(text, names).whole()
    if isinstance(found, Constant) and not math.isfinite(found.value):
        raise ConfigError(f'the expression "{text[:80]}" is not finite')
    return found


def joined(sign: str, left: Expression, right: Expression) -> Expression:
    """The operation, or its number where both sides are numbers."""
    if isinstance(left, Constant) and isinstance(right, Constant):
        return Constant(float(_operated(sign, _number(left), _number(right))))
    return Operation(sign, left, right)


def depth(expression: Expression) -> int:
    """Operations inside of each other."""
    if not isinstance(expression, Operation):
        return 0
    return 1 + max(depth(expression.left), depth(expression.right))


def names_in(expression: Expression) -> set[str]:
    if isinstance(expression, Operation):
        return names_in(expression.left) | names_in(expression.right)
    return {expression.name} if isinstance(expression, Named) else set()


def evaluate(expression: Expression, values: Mapping[str, Tensor]) -> Tensor:
    """Values [N] of the expression, of those of its names [N]; a scalar where it has none."""
    if isinstance(expression, Named):
        return values[expression.name]
    if isinstance(expression, Constant):
        return _number(expression)
    left, right = (evaluate(side, values) for side in (expression.left, expression.right))
    return _operated(expression.sign, left, right)


def written(expression: Expression) -> str:
    """The expression as Python, over its names and a function `ratio(a, b)`: a / b where |b| is at
    least SMALL."""
    if isinstance(expression, Named):
        return expression.name
    if isinstance(expression, Constant):
        return f"{expression.value!r}"
    left, right = written(expression.left), written(expression.right)
    if expression.sign == "/" and isinstance(expression.right, Constant):
        right = repr(expression.right.value if abs(expression.right.value) >= SMALL else SMALL)
    divided = expression.sign == "/" and not isinstance(expression.right, Constant)
    return f"ratio({left}, {right})" if divided else f"({left} {expression.sign} {right})"


def _number(constant: Constant) -> Tensor:
    return torch.tensor(constant.value)


def _operated(sign: str, left: Tensor, right: Tensor) -> Tensor:
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    if sign == "*":
        return left * right
    return left / torch.where(right.abs() < SMALL, SMALL, right)
