"""Reward reflection: training results as text for the designer (Eureka, Ma et al., 2023).

For each component and the task's score: ten evenly spaced values, minimum, mean and maximum; then a
constant advice.
"""

from __future__ import annotations

from collections.abc import Sequence

from embodied.reward_design.journal import Candidate
from embodied.reward_design.prompts import refusal

ADVICE = (
    "Read these numbers and write a better reward function.\n"
    "1. If the task's score stays near zero, rewrite the whole reward function.\n"
    "2. If a component hardly changes, it is not learned from: change its scale, write it anew, or "
    "leave it out.\n"
    "3. If one component is much larger than the others, scale it down to their size.\n"
    "First say what each component did, then answer with one code block that holds the whole "
    "program."
)


def reflect(candidate: Candidate) -> str:
    """Feedback on a candidate that was trained, or on why it was rejected."""
    if candidate.problem and not candidate.scores:
        return refusal(candidate.problem)
    lines = ["A policy was trained with your reward function. Values over its training:"]
    lines += [line(name, values) for name, values in curves(candidate).items()]
    lines.append(line("the task's score", [value for _, value in candidate.scores]))
    if candidate.problem:
        lines.append(f"Training ended early: {candidate.problem[:500]}")
    return "\n".join([*lines, "", ADVICE])


def curves(candidate: Candidate) -> dict[str, list[float]]:
    """Means of the components during training."""
    names = list(dict.fromkeys(name for point in candidate.terms for name in point["terms"]))
    return {
        name: [point["terms"][name][0] for point in candidate.terms if name in point["terms"]]
        for name in names
    }


def line(name: str, values: Sequence[float]) -> str:
    if not values:
        return f"{name}: never measured"
    shown = ", ".join(f"{value:.3g}" for value in values)
    low = min(values)
    high = max(values)
    mean = sum(values) / len(values)
    return f"{name}: [{shown}], min {low:.3g}, mean {mean:.3g}, max {high:.3g}"
