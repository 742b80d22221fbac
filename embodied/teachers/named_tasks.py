"""Places that a user names in task space: the easy task to start from, the one to end at."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from embodied.core.build import ConfigError, nearest
from embodied.teachers.task_space import Floats, TaskSpace


def place(space: TaskSpace, named: Mapping[str, float], default: float, setting: str) -> Floats:
    """The point [d] of the cube where task parameters have the `named` values (as the world counts
    them, in [0, 1]); those not named are at `default` of their box."""
    point = np.full(len(space), default)
    for name, value in named.items():
        if name not in space.names:
            raise ConfigError(f'teacher.{setting}: no "{name}" varies{nearest(name, space.names)}')
        at = space.names.index(name)
        low, high = (end[space.moving[at]] for end in (space.low, space.high))
        if not low <= value <= high:
            raise ConfigError(
                f"teacher.{setting}: {name}={value:g} is outside of its box [{low:g}, {high:g}]"
            )
        point[at] = (value - low) / (high - low)
    return point
