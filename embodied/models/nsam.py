"""NSAM: safe models of discrete actions on facts and amounts (Mordoch et al., 2023).

From observed steps (s, a, s') of an action, where s has facts (booleans) and amounts (numbers):

    facts before      those that had one value in every s
    amounts before    the convex hull of the observed ones: B (x - o) = 0 and A P (x - o) <= b
    effects           facts with one value in every s', amounts x' = W x + c, exactly

o is an observed point, P a basis of the span of the others and B of its complement. The model is
safe: where the true conditions are convex and the true effects are of this form, an action that it
allows can be taken and does what it predicts, as an affine function is determined on the span of
the points that it fits. What no such form fits is not used at all.

Differences from the published code: no monomials; where several forms fit, an increment comes
before a constant, and that before the affine function of least norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import needed

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]
EXACT = 1e-6  # largest error of a condition or an effect, of numbers up to 1; observed in float32


@dataclass(frozen=True)
class Conditions:
    """`equal` x = `level` [e, K], [e] and `most` x <= `limit` [m, K], [m]."""

    equal: Numbers
    level: Numbers
    most: Numbers
    limit: Numbers

    def hold(self, amounts: Numbers) -> Flags:
        """Whether they hold, [n], for amounts [n, K]."""
        same = np.abs(amounts @ self.equal.T - self.level) <= slack(self.level)
        below = amounts @ self.most.T <= self.limit + slack(self.limit)
        return np.asarray(same.all(1) & below.all(1))


def slack(values: Numbers) -> Numbers:
    """The errors [...] that numbers which should be `values` [...] may have."""
    return EXACT * np.maximum(1.0, np.abs(values))


def hull(points: Numbers) -> Conditions:
    """The convex hull of points [n, K]; in the span of them, if that is smaller."""
    origin = points[0]
    _, size, basis = np.linalg.svd(points - origin)
    rank = int((size > EXACT * max(1.0, float(np.abs(points).max()))).sum())
    inside, outside = basis[:rank], _echelon(basis[rank:])
    level = outside @ origin
    flat = (points - origin) @ inside.T
    if rank == 0:
        return Conditions(outside, level, np.zeros((0, len(origin))), np.zeros(0))
    if rank == 1:
        sides = np.array([[1.0], [-1.0]])
        limits = np.array([flat.max(), -flat.min()])
    else:
        spatial = needed("scipy.spatial", "the hulls of NSAM need SciPy", "offline")
        faces = np.unique(spatial.ConvexHull(flat).equations.round(9), axis=0)
        sides, limits = faces[:, :-1], -faces[:, -1]
    most = sides @ inside
    return Conditions(outside, level, most, limits + most @ origin)


def _echelon(rows: Numbers) -> Numbers:
    """The reduced row echelon form of independent rows [e, K]: round numbers, where there are."""
    rows = rows.copy()
    for done in range(len(rows)):
        left = np.abs(rows[done:])
        row, column = np.unravel_index(left.argmax(), left.shape)
        rows[[done, done + row]] = rows[[done + row, done]]
        rows[done] /= rows[done, column]
        others = np.arange(len(rows)) != done
        rows[others] -= rows[others, column, None] * rows[done]
    return rows


@dataclass(frozen=True)
class ActionModel:
    """What is known of an action. `facts` and `sets`: values by the number of a fact; `weights`
    [K, K] and `offset` [K]: amounts after it."""

    facts: Mapping[int, bool]
    conditions: Conditions
    sets: Mapping[int, bool]
    weights: Numbers
    offset: Numbers

    def applicable(self, facts: Flags, amounts: Numbers) -> Flags:
        """Whether it is known to be allowed, [n], in states of facts [n, F] and amounts [n, K]."""
        allowed = self.conditions.hold(amounts)
        for place, value in self.facts.items():
            allowed &= facts[:, place] == value
        return allowed

    def after(self, facts: Flags, amounts: Numbers) -> tuple[Flags, Numbers]:
        """The states after it, [n, F] and [n, K]."""
        facts = facts.copy()
        for place, value in self.sets.items():
            facts[:, place] = value
        return facts, amounts @ self.weights.T + self.offset


def learned(
    facts: Flags, amounts: Numbers, facts_after: Flags, amounts_after: Numbers
) -> ActionModel | None:
    """The model of an action from its observed steps, facts [n, F] and amounts [n, K] before and
    after it; None if no form of effects fits."""
    always = (facts == facts[0]).all(0)
    known = {int(place): bool(facts[0, place]) for place in always.nonzero()[0]}
    changed = (facts != facts_after).any(0)
    if (changed & (facts_after != facts_after[0]).any(0)).any():
        return None
    sets = {int(place): bool(facts_after[0, place]) for place in changed.nonzero()[0]}
    effects = affine(amounts, amounts_after)
    if effects is None:
        return None
    return ActionModel(known, hull(np.unique(amounts, axis=0)), sets, *effects)


def affine(before: Numbers, after: Numbers) -> tuple[Numbers, Numbers] | None:
    """Weights [K, K] and offset [K] with `after` = weights `before` + offset, both [n, K]."""
    count = before.shape[1]
    weights, offset = np.eye(count), (after - before)[0]
    error = slack(np.abs(np.concatenate([before, after])).max(0))
    for place in range(count):
        if np.ptp(after[:, place] - before[:, place]) <= error[place]:
            continue
        if np.ptp(after[:, place]) <= error[place]:
            weights[place], offset[place] = 0.0, after[0, place]
            continue
        columns = np.column_stack([before, np.ones(len(before))])
        found = np.linalg.lstsq(columns, after[:, place], rcond=None)[0]
        if np.abs(columns @ found - after[:, place]).max() > error[place]:
            return None
        weights[place], offset[place] = found[:-1], found[-1]
    return weights, offset


class Nsam:
    """Models of all actions, of numbers 0 to `actions` - 1, from steps that are added."""

    def __init__(self, actions: int) -> None:
        self.steps: list[Numbers] = [np.zeros((0, 0))] * actions  # of each action: [n, 2 (F + K)]
        self.models: list[ActionModel | None] = [None] * actions

    def add(
        self,
        action: NDArray[np.int64],
        before: tuple[Flags, Numbers],
        after: tuple[Flags, Numbers],
    ) -> bool:
        """Add steps that were allowed: actions [n], facts [n, F] and amounts [n, K] before and
        after them. Returns whether a model changed."""
        facts = before[0].shape[1]
        states = np.column_stack([*before, *after]).astype(np.float64)
        changed = False
        for number in np.unique(action):
            old = self.steps[number]
            new = states[action == number]
            both = np.unique(np.concatenate([old, new]) if old.size else new, axis=0)
            if len(both) == len(old):
                continue
            self.steps[number] = both
            self.models[number] = _model(both, facts)
            changed = True
        return changed

    def restore(self, steps: Sequence[Numbers], facts: int) -> None:
        """Set the steps of each action, [n, 2 (F + K)], of states with `facts` facts."""
        self.steps = list(steps)
        self.models = [_model(each, facts) if each.size else None for each in steps]


def _model(steps: Numbers, facts: int) -> ActionModel | None:
    """The model of an action from its steps [n, 2 (F + K)]."""
    amounts = steps.shape[1] // 2 - facts
    parts = np.split(steps, np.cumsum([facts, amounts, facts]), 1)
    return learned(parts[0] > 0.5, parts[1], parts[2] > 0.5, parts[3])
