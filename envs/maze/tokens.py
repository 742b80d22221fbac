"""Mazes in words: the goal's cell, the start's, then the walls' in rising order.

As sets of walls have no order, any fixed one will do, but there has to be one (CLUTR, Azad et al.,
2023): otherwise each maze could be written in a great many ways.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Plan(Protocol):
    @property
    def walls(self) -> NDArray[np.bool_]: ...
    @property
    def start(self) -> NDArray[np.int64]: ...
    @property
    def goal(self) -> NDArray[np.int64]: ...


def spell(plans: Plan, length: int) -> NDArray[np.int64]:
    """Words [n, length]; S^2 where there is no wall any more. Of more walls than there is room for
    the last are left out."""
    walls = plans.walls.reshape(len(plans.goal), -1)
    cells = walls.shape[1]
    order = np.where(walls, np.arange(cells), cells)
    order = np.sort(np.pad(order, ((0, 0), (0, length)), constant_values=cells), axis=1)
    return np.concatenate([plans.goal[:, None], plans.start[:, None], order], 1)[:, :length]
