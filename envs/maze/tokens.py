"""Mazes as token sequences: the goal cell, the start cell, then the wall cells in ascending order.

Sets of walls have no order, so a fixed one is chosen (CLUTR, Azad et al., 2023); otherwise a maze
would have many token sequences.
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
