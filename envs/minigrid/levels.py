"""Levels: parameterised MiniGrid levels from a task vector, always solvable.

Parameters: arena size, walls, lava, a door (none, closed, locked with its key on the start side),
distance to the goal, and a seed for the rest. The level is a function of the vector only.
"""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

import gymnasium
import numpy as np
from minigrid.core.grid import Grid
from minigrid.core.mission import MissionSpace
from minigrid.core.world_object import Door, Goal, Key, Lava, Wall
from minigrid.minigrid_env import MiniGridEnv

Cell = tuple[int, int]
MOST_WALLS = 0.4  # of the cells that are free at first
MOST_LAVA = 0.25  # likewise
MISSIONS = (
    "get to the green goal square",
    "open the door and then get to the goal",
    "use the key to open the door and then get to the goal",
)


class Levels(MiniGridEnv):
    """A grid of `size` x `size`, of which an arena of at least 3 x 3 is used.

    `reset(options={"task": [6] numbers in [0, 1]})` makes that level; without it the vector is
    drawn from the generator. `task` holds the present one.
    """

    task_names: ClassVar[tuple[str, ...]] = ("size", "walls", "lava", "door", "distance", "layout")

    def __init__(self, size: int = 11, max_steps: int | None = None, **kwargs: Any) -> None:
        if size < 5:
            raise ValueError(f"size={size} leaves no arena of 3 x 3 cells; it must be at least 5")
        self.task = np.zeros(len(self.task_names))
        self._given: np.ndarray | None = None
        space = MissionSpace(lambda mission: mission, [list(MISSIONS)])
        steps = 4 * size**2 if max_steps is None else max_steps
        super().__init__(mission_space=space, grid_size=size, max_steps=steps, **kwargs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._given = None
        if options is not None and "task" in options:
            self._given = np.asarray(options["task"], np.float64)
            shape = (len(self.task_names),)
            there = self._given
            if there.shape != shape or not ((there >= 0) & (there <= 1)).all():
                raise ValueError(
                    f"a task of Levels must be {shape[0]} numbers in [0, 1] "
                    f"({', '.join(self.task_names)}), got {there.tolist()}"
                )
        return super().reset(seed=seed)

    def _gen_grid(self, width: int, height: int) -> None:
        if self._given is None:
            self.task = self.np_random.random(len(self.task_names))
        else:
            self.task = self._given
        size, walls, lava, door, distance, layout = (float(number) for number in self.task)
        random = np.random.default_rng(round(layout * 2**24))
        side = 3 + round(size * (width - 5))
        kind = min(int(door * 3), 2)
        plan = Plan(side, kind, random)
        plan.fill("wall", walls * MOST_WALLS, random)
        plan.fill("lava", lava * MOST_LAVA, random)
        goal = plan.goal(distance)
        turned = bool(random.integers(2))  # rows and columns are exchanged
        self.grid = Grid(width, height)
        for x in range(width):
            for y in range(height):
                if (x, y) not in plan.free:
                    self.grid.set(*_place((x, y), turned), Wall())
        for cell in plan.lava:
            self.grid.set(*_place(cell, turned), Lava())
        self.put_obj(Goal(), *_place(goal, turned))
        if plan.door is not None:
            self.put_obj(Door("yellow", is_locked=kind == 2), *_place(plan.door, turned))
        if plan.key is not None:
            self.put_obj(Key("yellow"), *_place(plan.key, turned))
        self.agent_pos = _place(plan.start, turned)
        self.agent_dir = int(random.integers(4))
        self.mission = MISSIONS[kind]


class Plan:
    """A level's cells before they are objects; `free` has door, key, start and lava in it, too."""

    def __init__(self, side: int, kind: int, random: np.random.Generator) -> None:
        self.free = {(x, y) for x in range(1, side + 1) for y in range(1, side + 1)}
        self.lava: set[Cell] = set()
        self.door = self.key = None
        near = sorted(self.free)
        if kind:
            split = int(random.integers(2, side))
            self.door = (split, int(random.integers(1, side + 1)))
            self.free -= {(split, y) for y in range(1, side + 1) if y != self.door[1]}
            near = [cell for cell in near if cell[0] < split]
        places = random.permutation(len(near))
        self.start = near[places[0]]
        if kind == 2:
            self.key = near[places[1]]

    def fill(self, what: str, share: float, random: np.random.Generator) -> None:
        """Turn about `share` of the free cells into walls or lava, keeping the level solvable."""
        cells = sorted(self.free - self.lava - {self.start, self.door, self.key})
        wanted = round(share * len(cells))
        for place in random.permutation(len(cells)):
            if wanted <= 0:
                return
            cell = cells[place]
            (self.lava.add if what == "lava" else self.free.remove)(cell)
            # The key has to be reached without passing the door.
            before = self._ways({self.door}) if self.door is not None else {}
            if (self.key is None or self.key in before) and self._goals():
                wanted -= 1
            else:
                (self.lava.remove if what == "lava" else self.free.add)(cell)

    def goal(self, distance: float) -> Cell:
        """The cell at this quantile of the ways from the start (behind the door, if any)."""
        ways = self._goals()
        ranked = sorted(ways, key=lambda cell: (ways[cell], cell))
        return ranked[round(distance * (len(ranked) - 1))]

    def _goals(self) -> dict[Cell, int]:
        return {
            cell: steps
            for cell, steps in self._ways(set()).items()
            if cell not in (self.start, self.door, self.key)
            and (self.door is None or cell[0] > self.door[0])
        }

    def _ways(self, shut: set[Cell]) -> dict[Cell, int]:
        """Steps from the start to every cell that can be reached without entering `shut`."""
        ways = {self.start: 0}
        queue = deque([self.start])
        open_ = self.free - self.lava - shut
        while queue:
            x, y = queue.popleft()
            for cell in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
                if cell in open_ and cell not in ways:
                    ways[cell] = ways[x, y] + 1
                    queue.append(cell)
        return ways


def _place(cell: Cell, turned: bool) -> Cell:
    return (cell[1], cell[0]) if turned else cell


gymnasium.register("Levels-v0", entry_point="embodied.envs.minigrid.levels:Levels")
