"""MazeLevels: encodes, samples, edits and checks mazes as task vectors.

A level of side S is S^2 + 3 numbers in [0, 1]: a wall where one of the first S^2 (row-major) is at
least 1/2, then the start cell, the goal cell (cell c is c/S^2 to (c + 1)/S^2) and the initial
heading in quarters (right, down, left, up). Start and goal are never walls; a goal on the start is
moved to the next cell. Every vector in the unit cube is therefore a level.

Used by minimax-regret teachers: Dennis et al., 2020; Parker-Holder et al., 2022.

Held-out evaluation mazes are hand-made, or labyrinths from a fixed seed: a labyrinth has exactly
one path between any two of its cells (randomised depth-first search). The literature's zero-shot
evaluation mazes of 13 x 13 cells (`zero_shot.yaml`) are maps of Dennis et al. (2020) and Jiang et
al. (2021), as evaluated by JaxUED (Coward et al., 2024). `SixteenRooms2` is SixteenRoomsFewerDoors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

SIDE = 13
HEADINGS = ">v<^"  # 0 to 3


Walls = NDArray[np.bool_]


@dataclass(frozen=True)
class Maze:
    """`walls` [S, S], by row and column; `start` and `goal` are cells (row * S + column)."""

    name: str
    walls: Walls
    start: int
    goal: int
    facing: int = 0


def zero_shot() -> list[Maze]:
    """The eight mazes, then those rotations and reflections that are other mazes (`NAME_1` ...)."""
    maps = yaml.safe_load(Path(__file__).with_name("zero_shot.yaml").read_text())
    published = [_read(name, lines.split()) for name, lines in maps.items()]
    mazes = {_layout(maze): maze for maze in published}
    for maze in published:
        for number in range(1, 8):
            other = _turned(maze, number % 4, number > 3)
            mazes.setdefault(_layout(other), replace(other, name=f"{maze.name}_{number}"))
    return list(mazes.values())


def _turned(maze: Maze, quarters: int, mirrored: bool) -> Maze:
    """Turned to the left by `quarters` of a turn, then mirrored left to right."""
    cells = np.rot90(np.arange(SIDE**2).reshape(SIDE, SIDE), quarters)
    facing = (maze.facing - quarters) % 4
    if mirrored:
        cells = cells[:, ::-1]
        facing = (2 - facing) % 4
    place = np.argsort(cells.ravel())  # where each cell goes
    walls = maze.walls.ravel()[cells]
    return Maze(maze.name, walls, int(place[maze.start]), int(place[maze.goal]), facing)


def _layout(maze: Maze) -> tuple[bytes, int, int]:
    return maze.walls.tobytes(), maze.start, maze.goal


def _read(name: str, lines: list[str]) -> Maze:
    text = "".join(lines)
    start = next(at for at, mark in enumerate(text) if mark in HEADINGS)
    walls = np.array([[mark == "#" for mark in line] for line in lines])
    return Maze(name, walls, start, text.index("G"), HEADINGS.index(text[start]))


LABYRINTHS = 20


def mazes(side: int, random: np.random.Generator) -> list[Maze]:
    """The hand-made mazes in both directions, then the labyrinths from a free cell to the farthest
    one.
    """
    hand = [corridors(side), comb(side), four_rooms(side), rings(side), pillars(side)]
    back = [Maze(f"{maze.name}_back", maze.walls, maze.goal, maze.start) for maze in hand]
    return hand + back + [labyrinth(side, random, f"labyrinth_{i}") for i in range(LABYRINTHS)]


def corridors(side: int) -> Maze:
    """One long way, to and fro."""
    walls = np.zeros((side, side), bool)
    walls[1::2] = True
    for turn, row in enumerate(range(1, side, 2)):
        walls[row, 0 if turn % 2 else side - 1] = False
    return Maze("corridors", walls, 0, _farthest(walls, 0))


def comb(side: int) -> Maze:
    """Dead ends side by side, open along the lowest row."""
    walls = np.zeros((side, side), bool)
    walls[:-1, 1::2] = True
    return Maze("comb", walls, 0, side - 1 - (side + 1) % 2)


def four_rooms(side: int) -> Maze:
    walls = np.zeros((side, side), bool)
    middle = side // 2
    walls[middle] = walls[:, middle] = True
    near = middle // 2
    far = (middle + 1 + side) // 2
    for place in (near, far):
        walls[middle, place] = walls[place, middle] = False
    return Maze("four_rooms", walls, 0, side * side - 1)


def rings(side: int) -> Maze:
    """Rings around the middle, each with one gap, above and below in turn."""
    row, column = np.indices((side, side))
    depth = np.minimum(np.minimum(row, column), side - 1 - np.maximum(row, column))
    walls = depth % 2 == 1
    for turn, ring in enumerate(range(1, (side + 1) // 2, 2)):
        walls[side - 1 - ring if turn % 2 else ring, side // 2] = False
    middle = side // 2
    walls[middle, middle] = False
    return Maze("rings", walls, side * side - 1, middle * side + middle)


def pillars(side: int) -> Maze:
    """Single blocks in a lattice."""
    walls = np.zeros((side, side), bool)
    walls[1::2, 1::2] = True
    end = side - 1 - (side + 1) % 2
    return Maze("pillars", walls, 0, end * side + end)


def labyrinth(side: int, random: np.random.Generator, name: str = "labyrinth") -> Maze:
    walls = np.ones((side, side), bool)
    rooms = np.arange(0, side, 2)
    here = (int(random.choice(rooms)), int(random.choice(rooms)))
    walls[here] = False
    path = [here]
    while path:
        row, column = path[-1]
        ahead = [(row + dy, column + dx) for dy, dx in ((0, 2), (2, 0), (0, -2), (-2, 0))]
        new = [(y, x) for y, x in ahead if 0 <= y < side and 0 <= x < side and walls[y, x]]
        if not new:
            path.pop()
            continue
        y, x = new[int(random.integers(len(new)))]
        walls[y, x] = walls[(y + row) // 2, (x + column) // 2] = False
        path.append((y, x))
    start = int(random.choice(np.flatnonzero(~walls)))
    return Maze(name, walls, start, _farthest(walls, start))


def _farthest(walls: Walls, start: int) -> int:
    return int(distances(walls[None], np.array([start])).argmax())


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


CELL = 16  # pixels
GROUND = (244, 241, 234)
WALL = (58, 66, 82)
LINE = (228, 223, 212)
GOAL = (46, 150, 92)
AGENT = (196, 66, 42)
NAMES = ("right", "down", "left", "up")
ARROWS = ">v<^"


def drawing(
    walls: NDArray[np.bool_], goal: int, agent: tuple[int, int], facing: int
) -> NDArray[np.uint8]:
    """[16 (S + 2), 16 (S + 2), 3]: the maze and the wall around it; the agent (row, column) is a
    triangle that points where it looks."""
    side = len(walls)
    cells = np.full((side, side, 3), GROUND, np.uint8)
    cells[walls] = WALL
    cells[divmod(goal, side)] = GOAL
    picture = cells.repeat(CELL, 0).repeat(CELL, 1)
    open_ = (picture != WALL).any(2)
    lines = np.zeros_like(open_)
    lines[::CELL] = lines[:, ::CELL] = True
    picture[lines & open_ & (picture == GROUND).all(2)] = LINE
    top = agent[0] * CELL
    left = agent[1] * CELL
    picture[top : top + CELL, left : left + CELL][triangle(facing)] = AGENT
    frame = np.empty((picture.shape[0] + 2 * CELL, picture.shape[1] + 2 * CELL, 3), np.uint8)
    frame[:] = WALL
    frame[CELL:-CELL, CELL:-CELL] = picture
    return frame


def triangle(facing: int) -> NDArray[np.bool_]:
    """[16, 16]: a triangle that points right, down, left or up."""
    down, across = (np.indices((CELL, CELL)) + 0.5) / CELL
    right = (across > 0.15) & (abs(down - 0.5) < 0.4 * (0.9 - across) / 0.75)
    return np.rot90(right, -int(facing))


def words(walls: NDArray[np.bool_], goal: int, agent: tuple[int, int], facing: int) -> str:
    """The map, one character a cell, and where the agent stands."""
    side = len(walls)
    rows = [["#" if wall else "." for wall in row] for row in walls]
    rows[goal // side][goal % side] = "G"
    rows[agent[0]][agent[1]] = ARROWS[facing]
    top = "#" * (side + 2)
    lines = [top, *(f"#{''.join(row)}#" for row in rows), top]
    where = f"row {agent[0]}, column {agent[1]}, looking {NAMES[facing]}"
    return "\n".join([*lines, f"You are at {where}; G is the goal."])


def spell(plans: Plans, length: int) -> NDArray[np.int64]:
    """Words [n, length]: the goal cell, the start cell, then the wall cells in ascending order.

    Sets have no order, so one is chosen (CLUTR, Azad et al., 2023). S^2 stands where there is no
    wall any more; of more walls than there is room for, the last are left out.
    """
    walls = plans.walls.reshape(len(plans.goal), -1)
    cells = walls.shape[1]
    order = np.where(walls, np.arange(cells), cells)
    order = np.sort(np.pad(order, ((0, 0), (0, length)), constant_values=cells), axis=1)
    return np.concatenate([plans.goal[:, None], plans.start[:, None], order], 1)[:, :length]


Floats = NDArray[np.float64]
MARKS = 3  # elements of a vector that are not cells
EDIT_GOAL = 0.1  # share of edits that move the goal instead of a wall
HELD_OUT = 20_611  # seed of the held-out evaluation mazes
LONG = 200  # levels with the longest shortest paths
AMONG = 4_000  # of how many random ones


@dataclass(frozen=True)
class Plans:
    """n levels: `walls` [n, S, S] (bool, by row and column), `start`, `goal` (cells) and `facing`
    [n] (0 to 3)."""

    walls: NDArray[np.bool_]
    start: NDArray[np.int64]
    goal: NDArray[np.int64]
    facing: NDArray[np.int64]


class MazeLevels:
    """Levels of `side` x `side` cells; sampled levels have up to `blocks` walls.

    All sampled or edited levels have a path from start to goal, the shortest of at least `shortest`
    cells, and none of them is in `held_out`.
    """

    def __init__(self, side: int, blocks: int, held_out: str = "mixed", shortest: int = 0) -> None:
        if side < 5:
            raise ValueError(f"side={side} is too small for a maze; it must be at least 5")
        self.side = side
        self.cells = side * side
        if not 0 <= blocks <= self.cells - 2:
            raise ValueError(f"blocks={blocks} must be 0 to {self.cells - 2} for side={side}")
        if not 0 <= shortest <= 2 * side - 4:  # longer ones are too rare to be sampled
            raise ValueError(f"shortest={shortest} must be 0 to {2 * side - 4} for side={side}")
        self.blocks = blocks
        self.size = self.cells + MARKS
        self.shortest = 0
        walls = (f"wall_{y}_{x}" for y in range(side) for x in range(side))
        self.names = (*walls, "start", "goal", "facing")
        self.lots = self.cells + 2  # uniform numbers per level
        # In words (maze_words.py): goal, start, and walls or nothing.
        self.words = self.cells + 1
        self.length = blocks + 2
        self.marks = 2
        made = {"mixed": self._held_out, "zero_shot": self._zero_shot, "long": self._long}
        self.held_out_names, self.held_out = made[held_out]()
        self.shortest = shortest  # not for held-out levels
        self._secret = {_key(level) for level in self._canonical(self.held_out)}

    def decode(self, levels: Floats) -> Plans:
        """Decode task vectors [n, S^2 + 3]; ValueError if the size is wrong or a value is not in
        [0, 1].
        """
        if levels.ndim != 2 or levels.shape[1] != self.size:
            raise ValueError(
                f"a maze of side {self.side} is {self.size} numbers, got {list(levels.shape)[1:]}"
            )
        if not ((levels >= 0) & (levels <= 1)).all():
            raise ValueError("maze levels must be in [0, 1]")
        rows = np.arange(len(levels))
        last = self.cells - 1
        walls = levels[:, : self.cells] >= 0.5
        # A little more than the number: float32 may be just below a cell's own bound.
        start, goal = (
            np.minimum((levels[:, self.cells + i] * self.cells + 1e-3).astype(np.int64), last)
            for i in range(2)
        )
        goal = np.where(goal == start, (goal + 1) % self.cells, goal)
        facing = np.minimum((levels[:, -1] * 4 + 1e-3).astype(np.int64), 3)
        walls[rows, start] = walls[rows, goal] = False
        return Plans(walls.reshape(-1, self.side, self.side), start, goal, facing)

    def encode(self, plans: Plans) -> Floats:
        """Task vectors [n, S^2 + 3]; the inverse of `decode`."""
        marks = ((plans.start + 0.5) / self.cells, (plans.goal + 0.5) / self.cells)
        columns = np.stack([*marks, (plans.facing + 0.5) / 4], 1)
        return np.concatenate([plans.walls.reshape(-1, self.cells).astype(float), columns], 1)

    def drawn(self, lots: Floats) -> Floats:
        """Levels [n, S^2 + 3] from uniform numbers [n, `lots`], possibly unsolvable: the number of
        walls is uniform up to `blocks`, then their positions are.
        """
        count = (lots[:, 0] * (self.blocks + 1)).astype(np.int64).clip(max=self.blocks)
        return self._placed(count, lots)

    def random(self, n: int, random: np.random.Generator) -> Floats:
        """[n, S^2 + 3]: sampled levels that are solvable and not held out."""
        return self._draw_until(self.drawn, n, random)

    def plain(self, n: int, random: np.random.Generator) -> Floats:
        """[n, S^2 + 3]: levels without walls, with random start and goal."""
        return self._draw_until(
            lambda lots: self._placed(np.zeros(len(lots), int), lots), n, random
        )

    def mutate(self, levels: Floats, edits: int, random: np.random.Generator) -> Floats:
        """[n, S^2 + 3]: levels after `edits` edits each (a wall toggled, or the goal moved). Edits
        that would make a level unsolvable or held out are skipped.
        """
        levels = edited = self._canonical(levels)
        cells = random.integers(self.cells, size=(edits, len(levels)))
        goals = random.random((edits, len(levels))) < EDIT_GOAL
        for cell, moved in zip(cells, goals, strict=True):
            edited = self._edited(edited, cell, moved)
        # Most come out fit: one look instead of one after every edit.
        torn = np.flatnonzero(~self.fit(edited))
        if len(torn):
            edited[torn] = self._with_edits(levels[torn], cells[:, torn], goals[:, torn])
        return edited

    def spell(self, levels: Floats) -> NDArray[np.int64]:
        """[n, blocks + 2]: tokens of goal, start and wall cells, padded with S^2."""
        return spell(self.decode(levels), self.length)

    def built(self, words: NDArray[np.int64], random: np.random.Generator) -> Floats:
        """[n, S^2 + 3] from tokens [n, blocks + 2], with any initial heading; walls that would make
        a level unsolvable or held out are skipped.
        """
        goal, start = (words[:, i].clip(max=self.cells - 1) for i in range(2))
        free = np.zeros((len(words), self.side, self.side), bool)
        empty = Plans(free, start, goal, random.integers(4, size=len(words)))
        levels = self._canonical(self.encode(empty))
        # Return the levels with all walls of `words` [n, k], none on start or goal.
        walls = np.zeros((len(levels), self.cells + 1))
        np.put_along_axis(walls, words[:, self.marks :].clip(max=self.cells), 1.0, axis=1)
        whole = self._canonical(np.concatenate([walls[:, :-1], levels[:, self.cells :]], 1))
        torn = np.flatnonzero(~self.fit(whole))
        if len(torn):
            whole[torn] = self._with_walls(levels[torn], words[torn, self.marks :])
        lost = np.flatnonzero(~self.fit(whole))  # an empty one that is held out
        if len(lost):
            whole[lost] = self.random(len(lost), random)
        return whole

    def solvable(self, levels: Floats) -> NDArray[np.bool_]:
        """[n]: whether there is a way from start to goal."""
        return self.ways(levels) >= 0

    def fit(self, levels: Floats) -> NDArray[np.bool_]:
        """[n]: whether a level may be used in training: solvable, not too easily, and not held
        out."""
        secret = [_key(level) in self._secret for level in self._canonical(levels)]
        return (self.ways(levels) >= self.shortest) & ~np.array(secret, dtype=bool)

    def ways(self, levels: Floats) -> NDArray[np.int64]:
        """[n]: length of the shortest path from start to goal in cells; -1 if there is none."""
        plans = self.decode(levels)
        steps = distances(plans.walls, plans.start, plans.goal).reshape(len(levels), -1)
        return steps[np.arange(len(levels)), plans.goal]

    def picture(self, level: Floats) -> NDArray[np.uint8]:
        """Image [h, w, 3] of one level [S^2 + 3], with the agent at its start."""
        plans = self.decode(level[None])
        start = divmod(int(plans.start[0]), self.side)
        return drawing(plans.walls[0], int(plans.goal[0]), start, int(plans.facing[0]))

    def traits(self, levels: Floats) -> dict[str, float]:
        """Means over levels for the log: number of walls, length of the shortest path."""
        walls = self.decode(levels).walls.sum((1, 2)).mean()
        return {"walls": float(walls), "way": float(self.ways(levels).mean())}

    def _with_walls(self, levels: Floats, words: NDArray[np.int64]) -> Floats:
        """Add each of the walls in turn, unless a level would be unfit with it."""
        for column in words.T:
            # [n, S^2 + 3]: 1 at one cell each, or nowhere.
            one = np.zeros((len(column), self.size))
            at = np.flatnonzero(column < self.cells)
            one[at, column[at]] = 1
            tried = self._canonical(np.maximum(levels, one))
            levels = np.where(self.fit(tried)[:, None], tried, levels)
        return levels

    def _with_edits(
        self, levels: Floats, cells: NDArray[np.int64], goals: NDArray[np.bool_]
    ) -> Floats:
        """Make each of the edits [k, n] in turn, unless a level would be unfit with it."""
        for cell, moved in zip(cells, goals, strict=True):
            tried = self._edited(levels, cell, moved)
            levels = np.where(self.fit(tried)[:, None], tried, levels)
        return levels

    def _canonical(self, levels: Floats) -> Floats:
        return self.encode(self.decode(levels))

    def _placed(self, count: NDArray[np.int64], lots: Floats) -> Floats:
        """The cells with the `count` lowest lots are walls, those with the highest start, goal."""
        order = lots[:, 1:-1].argsort(1)
        rank = order.argsort(1)
        walls = (rank < count[:, None]).reshape(-1, self.side, self.side)
        facing = np.minimum((lots[:, -1] * 4).astype(np.int64), 3)
        return self.encode(Plans(walls, order[:, -2], order[:, -1], facing))

    def _draw_until(
        self, make: Callable[[Floats], Floats], n: int, random: np.random.Generator
    ) -> Floats:
        levels = make(random.random((n, self.lots)))
        while len(unfit := np.flatnonzero(~self.fit(levels))):
            levels[unfit] = make(random.random((len(unfit), self.lots)))
        return levels

    def _edited(self, levels: Floats, cell: NDArray[np.int64], moved: NDArray[np.bool_]) -> Floats:
        """One edit each: the wall at `cell` [n] put or taken away, or the goal moved there."""
        rows = np.arange(len(levels))
        edited = levels.copy()
        plans = self.decode(levels)
        taken = (cell == plans.start) | (cell == plans.goal)
        flip = ~moved & ~taken
        edited[rows[flip], cell[flip]] = 1 - edited[rows[flip], cell[flip]]
        moved = moved & ~taken
        edited[rows[moved], cell[moved]] = 0
        edited[rows[moved], self.cells + 1] = (cell[moved] + 0.5) / self.cells
        return edited

    def _held_out(self) -> tuple[tuple[str, ...], Floats]:
        """The named mazes, seeded labyrinths and seeded blocks, the same for every run."""
        random = np.random.default_rng(HELD_OUT)
        named = mazes(self.side, random)
        levels = self._encoded(named, random.integers(4, size=len(named)))
        self._secret: set[bytes] = set()
        blocks = self.random(20, random)
        names = (*(maze.name for maze in named), *(f"blocks_{i}" for i in range(20)))
        return names, np.concatenate([levels, blocks])

    def _zero_shot(self) -> tuple[tuple[str, ...], Floats]:
        """The published mazes, each with the heading that it was published with, and their
        rotations and reflections."""
        if self.side != SIDE:
            raise ValueError(f"held_out=zero_shot are mazes of side {SIDE}, not {self.side}")
        named = zero_shot()
        levels = self._encoded(named, np.array([maze.facing for maze in named]))
        return tuple(maze.name for maze in named), levels

    def _encoded(self, named: list[Maze], facing: NDArray[np.int64]) -> Floats:
        walls = np.stack([maze.walls for maze in named])
        start = np.array([maze.start for maze in named])
        goal = np.array([maze.goal for maze in named])
        return self.encode(Plans(walls, start, goal, facing))

    def _long(self) -> tuple[tuple[str, ...], Floats]:
        """Random levels with all the walls and the longest shortest paths, longest first."""
        random = np.random.default_rng(HELD_OUT)
        self._secret: set[bytes] = set()
        walls = np.full(AMONG, self.blocks)
        levels = self._draw_until(
            lambda lots: self._placed(walls[: len(lots)], lots), AMONG, random
        )
        longest = np.argsort(-self.ways(levels), kind="stable")[:LONG]
        return tuple(f"long_{i}" for i in range(LONG)), levels[longest]


def _key(level: Floats) -> bytes:
    return np.round(level * 4096).astype(np.int16).tobytes()
