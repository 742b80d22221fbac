"""Plans on learned models of actions with facts and amounts: breadth first, or by ENHSP.

ENHSP (Scala et al., 2020) is a planner for numeric PDDL 2.1; it comes with the package `up-enhsp`
and needs Java. Breadth first finds a shortest plan where few states can be reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from embodied.core.build import needed
from embodied.models.nsam import ActionModel, Flags, Numbers

Models = Sequence[ActionModel | None]
Plan = list[int]
State = tuple[Flags, Numbers]  # facts [F] and amounts [K]
DIGITS = 10**6  # denominators of numbers in PDDL are at most this
SLACK = 5e-4  # of a condition, in units of its smallest weight: more than what rounding loses


def reached(state: State, goal: tuple[Mapping[int, bool], Mapping[int, float]]) -> bool:
    """Whether the facts are those of the goal, and the amounts at least its."""
    facts, least = goal
    true = all(state[0][place] == value for place, value in facts.items())
    return true and all(state[1][place] >= value for place, value in least.items())


def breadth_first(
    models: Models,
    start: State,
    goal: tuple[Mapping[int, bool], Mapping[int, float]],
    most: int = 20_000,
) -> Plan | None:
    """A shortest plan; None if there is none among the first `most` states."""
    if reached(start, goal):
        return []
    queue: deque[tuple[State, Plan]] = deque([(start, [])])
    seen = {_key(start)}
    while queue and len(seen) < most:
        (facts, amounts), plan = queue.popleft()
        for number, model in enumerate(models):
            if model is None or not model.applicable(facts[None], amounts[None])[0]:
                continue
            after = model.after(facts[None], amounts[None])
            state = (after[0][0], after[1][0])
            if _key(state) in seen:
                continue
            if reached(state, goal):
                return [*plan, number]
            seen.add(_key(state))
            queue.append((state, [*plan, number]))
    return None


def _key(state: State) -> bytes:
    return state[0].tobytes() + state[1].round(6).tobytes()


def enhsp(
    models: Models,
    start: State,
    goal: tuple[Mapping[int, bool], Mapping[int, float]],
    seconds: float = 60.0,
) -> Plan | None:
    """A plan by ENHSP; None if it finds none in `seconds`. ConfigError if it is not installed."""
    needed("up_enhsp", "planner=enhsp", "planning")
    up: Any = needed("unified_planning.shortcuts", "planner=enhsp", "planning")
    up.get_environment().credits_stream = None
    problem, facts, amounts = up.Problem("learned"), list[Any](), list[Any]()
    for place, value in enumerate(start[0].tolist()):
        facts.append(up.Fluent(f"fact{place}", up.BoolType()))
        problem.add_fluent(facts[-1], default_initial_value=bool(value))
    for place, value in enumerate(start[1].tolist()):
        amounts.append(up.Fluent(f"amount{place}", up.RealType()))
        problem.add_fluent(amounts[-1], default_initial_value=_fraction(value))
    for number, model in enumerate(models):
        if model is not None:
            problem.add_action(_action(up, number, model, facts, amounts))
    for place, value in goal[0].items():
        problem.add_goal(facts[place] if value else up.Not(facts[place]))
    for place, least in goal[1].items():
        problem.add_goal(up.GE(amounts[place], _fraction(least)))
    with up.OneshotPlanner(name="enhsp") as planner:
        found = planner.solve(problem, timeout=seconds)
    if found.plan is None:
        return None
    return [int(step.action.name.removeprefix("act")) for step in found.plan.actions]


def _action(up: Any, number: int, model: ActionModel, facts: list[Any], amounts: list[Any]) -> Any:
    """The action of unified_planning that `model` describes."""
    action = up.InstantaneousAction(f"act{number}")
    for place, value in model.facts.items():
        action.add_precondition(facts[place] if value else up.Not(facts[place]))
    rules = model.conditions
    for row, level in zip(rules.equal, rules.level, strict=True):
        weights, level = _rounded(row, level)
        weighed = _sum(up, weights, amounts)
        action.add_precondition(up.LE(weighed, _fraction(level + SLACK)))
        action.add_precondition(up.GE(weighed, _fraction(level - SLACK)))
    for row, limit in zip(rules.most, rules.limit, strict=True):
        weights, limit = _rounded(row, limit)
        weighed = _sum(up, weights, amounts)
        action.add_precondition(up.LE(weighed, _fraction(limit + SLACK)))
    for place, value in model.sets.items():
        action.add_effect(facts[place], value)
    for place, row in enumerate(model.weights):
        offset = _fraction(model.offset[place])
        if not np.array_equal(row, np.eye(len(row))[place]) or offset:
            action.add_effect(amounts[place], up.Plus(_sum(up, row, amounts), offset))
    return action


def _rounded(row: Numbers, limit: float) -> tuple[Numbers, float]:
    """A condition in units of its smallest weight, as amounts that are counted give round ones;
    PDDL has no 1e-05."""
    size = np.abs(row[np.abs(row) > 1e-6]).min()
    weights = (row / size).round(6)
    return np.where(np.abs(weights) < 1e-3, 0.0, weights), round(float(limit / size), 4)


def _sum(up: Any, row: Numbers, amounts: list[Any]) -> Any:
    parts = [
        up.Times(_fraction(weight), amount)
        for weight, amount in zip(row, amounts, strict=True)
        if _fraction(weight)
    ]
    return up.Plus(*parts) if parts else up.Real(Fraction(0))


def _fraction(number: float) -> Fraction:
    return Fraction(float(number)).limit_denominator(DIGITS)
