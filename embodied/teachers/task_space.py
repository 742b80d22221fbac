"""TaskSpace: the task parameters that a teacher varies, scaled to the unit cube."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import ConfigError, nearest
from embodied.core.spec import Leaf

Floats = NDArray[np.float64]


class TaskSpace:
    """The elements of a task vector (each in [0, 1]) between `low` and `high` [D].

    A teacher works with the d elements that vary, scaled to [0, 1]^d, so that distances mean the
    same in every environment. `names` are those elements' names; the others keep their values.
    """

    def __init__(self, task: Leaf | None, box: Mapping[str, tuple[float, float]]) -> None:
        if task is None or not task.size:
            raise ConfigError("this environment has no task parameters that a teacher could vary")
        names = task.names or tuple(f"task{i}" for i in range(task.size))
        low, high = np.zeros(task.size), np.ones(task.size)
        for name, (bottom, top) in box.items():
            if name not in names:
                raise ConfigError(f'no task parameter "{name}"{nearest(name, names)}')
            if not 0 <= bottom <= top <= 1:
                raise ConfigError(
                    f"the box of {name} is [{bottom:g}, {top:g}]; it needs 0 <= low <= high <= 1"
                )
            low[names.index(name)], high[names.index(name)] = bottom, top
        self.low = low
        self.high = high
        self.moving = np.flatnonzero(high > low)
        if not len(self.moving):
            raise ConfigError("teacher.box fixes every task parameter: none is left to vary")
        self.names = tuple(names[i] for i in self.moving)

    def __len__(self) -> int:
        """d: the number of elements that vary."""
        return len(self.names)

    def to_env(self, cube: Floats) -> Floats:
        """Points [n, d] of the cube as task vectors [n, D]."""
        tasks = np.repeat(self.low[None], len(cube), 0)
        width = (self.high - self.low)[self.moving]
        tasks[:, self.moving] += np.clip(cube, 0, 1) * width
        return tasks


def named_task(
    space: TaskSpace, named: Mapping[str, float], default: float, setting: str
) -> Floats:
    """The point [d] of the unit cube at which task parameters have the `named` values.

    Values are those of the task vector, in [0, 1]; parameters that are not named get `default` (a
    share of their box). ConfigError names `setting` where a name or a value is not allowed.
    """
    point = np.full(len(space), default)
    for name, value in named.items():
        if name not in space.names:
            raise ConfigError(
                f'teacher.{setting}: "{name}" is no task parameter that varies'
                f"{nearest(name, space.names)}"
            )
        at = space.names.index(name)
        low, high = (end[space.moving[at]] for end in (space.low, space.high))
        if not low <= value <= high:
            raise ConfigError(
                f"teacher.{setting}: {name}={value:g} is outside its box [{low:g}, {high:g}]"
            )
        point[at] = (value - low) / (high - low)
    return point
