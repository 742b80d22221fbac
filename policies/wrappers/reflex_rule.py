"""When a reflex overrides: one pure function for tensors in training and floats on a robot.

Bresa (2025): at every control tick a safety critic looks at the state of now and at what is about
to be done; above a threshold the running decision is cut off and a recovery acts in its place.
Two thresholds and a least duration keep it from chattering.
"""

from __future__ import annotations

from typing import Any


def reflexing(risk: Any, acting: Any, age: Any, on: float, off: float, least: int) -> Any:
    """Whether the reflex acts in this tick: begun above `on`, ended at `off` or below, not before
    it has acted for `least` ticks. `risk`, `acting` (so far) and `age` (ticks that it has acted
    for): tensors [n], or a float, a bool and an int."""
    return (risk > on) | (acting & ((risk > off) | (age < least)))
