"""Shortest-path distances in a batch of mazes, by breadth-first search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def distances(
    walls: NDArray[np.bool_], start: NDArray[np.int64], goal: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Steps [n, S, S] from `start` [n] (cells) to every cell, -1 where there is no way; all levels
    are flooded together, one step further each time. With `goal` [n] only until all of those that
    can be reached are: cells further away may be -1 too."""
    n, side, _ = walls.shape
    steps = np.full((n, side, side), -1)
    edge = np.zeros((n, side, side), bool)
    edge.reshape(n, -1)[np.arange(n), start] = True
    unseen = ~walls & ~edge
    step = 0
    rows = np.arange(n)
    while edge.any():
        steps[edge] = step
        if goal is not None and (steps.reshape(n, -1)[rows, goal] >= 0).all():
            break
        wave = np.zeros_like(edge)
        wave[:, 1:] |= edge[:, :-1]
        wave[:, :-1] |= edge[:, 1:]
        wave[:, :, 1:] |= edge[:, :, :-1]
        wave[:, :, :-1] |= edge[:, :, 1:]
        edge = wave & unseen
        unseen &= ~edge
        step += 1
    return steps
