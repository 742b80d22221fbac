"""Fast egocentric view of MiniGrid, byte-identical to `MiniGridEnv.gen_obs`.

MiniGrid copies, rotates and encodes a grid of Python objects for each observation, which takes most
of the time of a step. Here the cells of the view are selected by one precomputed index table per
direction, made with MiniGrid's own functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from minigrid.core.grid import Grid
from minigrid.core.world_object import Ball, Box, Floor, Goal, Key, Lava, Wall
from minigrid.minigrid_env import MiniGridEnv
from numpy.typing import NDArray

STILL = (Ball, Box, Floor, Goal, Key, Lava, Wall)  # what they look like never changes
EMPTY = bytes((1, 0, 0))
UNSEEN = bytes(3)


class View:
    """Replaces `world.gen_obs` for classes that use MiniGrid's own; see `attach`."""

    def __init__(self, world: MiniGridEnv) -> None:
        self.world = world
        self.size = world.agent_view_size
        self.tables = [_places(self.size, turn) for turn in range(4)]
        self.codes: dict[tuple[type, str], bytes] = {}
        self.beyond = Wall()

    def __call__(self) -> dict[str, Any]:
        """An observation as `MiniGridEnv.gen_obs` returns it."""
        world = self.world
        return {"image": self.look(), "direction": world.agent_dir, "mission": world.mission}

    def look(self) -> NDArray[np.uint8]:
        """The view [size, size, 3]: kind, colour and state of each cell, across and then along."""
        world = self.world
        size = self.size
        # The objects in view, column by column.
        grid = self.world.grid
        things = grid.grid
        width = grid.width
        height = grid.height
        x0 = int(self.world.agent_pos[0])
        y0 = int(self.world.agent_pos[1])
        cells = [
            things[y * width + x]
            if 0 <= (x := x0 + across) < width and 0 <= (y := y0 + down) < height
            else self.beyond
            for across, down in self.tables[self.world.agent_dir]
        ]
        mask = [True] * (size * size) if world.see_through_walls else seen(cells, size)
        cells[size // 2 * size + size - 1] = world.carrying or None
        parts = [
            self._code(cell) if shown else UNSEEN for cell, shown in zip(cells, mask, strict=True)
        ]
        return np.array(np.frombuffer(b"".join(parts), np.uint8).reshape(size, size, 3))

    def _code(self, cell: Any) -> bytes:
        if cell is None:
            return EMPTY
        kind = type(cell)
        if kind not in STILL:
            return bytes(cell.encode())
        code = self.codes.get((kind, cell.color))
        if code is None:
            code = self.codes[kind, cell.color] = bytes(cell.encode())
        return code


def attach(world: MiniGridEnv) -> None:
    """Replace the view of `world` by a View, unless its class overrides `gen_obs`."""
    own = type(world).gen_obs is not MiniGridEnv.gen_obs
    if not own and type(world).gen_obs_grid is MiniGridEnv.gen_obs_grid:
        world.gen_obs = View(world)  # pyright: ignore[reportAttributeAccessIssue]


def seen(cells: list[Any], size: int) -> list[bool]:
    """The lit cells [size * size] (bool), from the agent's own (middle column, last row) outwards.

    Row by row away from the agent, light runs right and then left, through whatever can be seen
    behind, and from there to the three cells ahead; the edge that it runs to passes none on.
    """
    mask = [False] * (size * size)
    mask[size // 2 * size + size - 1] = True
    order = [(i, 1) for i in range(size - 1)] + [(i, -1) for i in range(size - 1, 0, -1)]
    for j in range(size - 1, -1, -1):
        for i, way in order:
            place = i * size + j
            if not mask[place]:
                continue
            cell = cells[place]
            if cell is not None and not cell.see_behind():
                continue
            beside = place + way * size
            mask[beside] = True
            if j:
                mask[beside - 1] = True
                mask[place - 1] = True
    return mask


def _places(size: int, turn: int) -> list[tuple[int, int]]:
    """(x, y) from the agent of each cell of the view [size * size] when it looks `turn`."""
    half = size // 2
    corner = [(0, -half), (-half, 0), (1 - size, -half), (-half, 1 - size)][turn]
    grid = Grid(max(size, 3), max(size, 3))
    grid.grid = [(corner[0] + i, corner[1] + j) for j in range(size) for i in range(size)]  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(turn + 1):
        grid = grid.rotate_left()
    return [grid.get(i, j) for i in range(size) for j in range(size)]  # pyright: ignore[reportReturnType]
