"""Reflex rule of BRESA: when the recovery policy overrides; for tensors and for robot floats.

BRESA (2025): at every control tick a safety critic evaluates the current state and the action about
to be executed; above a threshold the recovery policy acts instead. Two thresholds (hysteresis) and
a minimum duration prevent chattering.
"""

from __future__ import annotations

from typing import Any


def reflexing(risk: Any, acting: Any, age: Any, on: float, off: float, least: int) -> Any:
    """Whether the reflex acts in this tick: it starts above `on` and ends at or below `off`, but
    not before `least` ticks. `risk`, `acting` (in the last tick) and `age` (ticks that it has acted
    for): tensors [n], or a float, a bool and an int."""
    return (risk > on) | (acting & ((risk > off) | (age < least)))
