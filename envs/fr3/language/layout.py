"""Layout: where everything is when an episode of the language tasks begins.

The cabinet is at the far left, the button at the far right. The plate is in one of two rows, with
room on its left; blocks, bowl and can take the five other places in any order. All of it is drawn
before, and without knowing, what the instruction will be.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embodied.envs.fr3.language.objects import BLOCK, BLOCKS, CAN, JOINTS, THICK
from embodied.envs.fr3.tasks.task import Floats, Start, spread, upright

ROWS = (0.35, 0.475)
"""The x of the two rows of places, m."""
PLACES = (-0.21, -0.07, 0.07, 0.21)
"""The y of the places in the row without the plate, m; the plate's row has the last one only."""
LYING = (*BLOCKS, "bowl", "can")
HEIGHT = {**dict.fromkeys(BLOCKS, BLOCK), "bowl": 0.0, "can": CAN}
DRAWS = 35


def initial(draws: Floats) -> Start:
    """Initial states of n episodes from uniform numbers [n, DRAWS]."""
    n = len(draws)
    row = (draws[:, 0] < 0.5).astype(int)
    order = np.argsort(draws[:, 1:6], axis=1)
    places = np.stack([*(np.stack([1 - row, np.full(n, i)], 1) for i in range(4)), _last(row)], 1)
    free = {}
    for number, name in enumerate(LYING):
        at = places[np.arange(n), order[:, number]]
        jitter = spread(draws[:, 6 + 2 * number : 8 + 2 * number], (-0.01, -0.012), (0.01, 0.012))
        x, y = np.array(ROWS)[at[:, 0]] + jitter[:, 0], np.array(PLACES)[at[:, 1]] + jitter[:, 1]
        yaw = spread(draws[:, 16 + number : 17 + number], (-0.25,), (0.25,))[:, 0]
        free[name] = (np.stack([x, y, np.full(n, HEIGHT[name])], 1), upright(yaw))
    place = spread(draws[:, 21:23], (-0.01, -0.19), (0.01, -0.06))
    plate = np.stack([np.array(ROWS)[row] + place[:, 0], place[:, 1], np.full(n, THICK)], 1)
    free["plate"] = (plate, upright(np.zeros(n)))
    fixed = spread(draws[:, 23:27], (0.63, 0.21, 0.625, -0.23), (0.65, 0.23, 0.655, -0.17))
    zero = np.zeros((n, 1))
    return Start(
        tool=spread(draws[:, 27:30], (0.40, -0.10, 0.22), (0.56, 0.10, 0.30)),
        width=np.full(n, 0.08),
        free=free,
        marker={
            "cabinet": np.concatenate([fixed[:, :2], zero], 1),
            "button": np.concatenate([fixed[:, 2:], zero], 1),
        },
        memory={
            "plate_from": plate,
            **dict(zip(JOINTS, (0.07 + 0.02 * draws[:, 30], np.zeros(n)), strict=True)),
        },
    )


def _last(row: NDArray[np.intp]) -> NDArray[np.intp]:
    return np.stack([row, np.full(len(row), 3)], 1)
