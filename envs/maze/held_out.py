"""Held-out evaluation mazes: hand-made ones, and labyrinths from a fixed seed.

A labyrinth has exactly one path between any two of its cells (randomised depth-first search).

The literature's zero-shot evaluation mazes of 13 x 13 cells (`zero_shot.yaml`) are maps of Dennis
et al. (2020) and Jiang et al. (2021), as evaluated by JaxUED (Coward et al., 2024). `SixteenRooms2`
is SixteenRoomsFewerDoors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from embodied.envs.maze.batch_levels import distances

SIDE = 13
HEADINGS = ">v<^"  # 0 to 3


@dataclass(frozen=True)
class Published:
    """`walls` [13, 13] (bool); `start` and `goal` are cells (row * 13 + column)."""

    name: str
    walls: NDArray[np.bool_]
    start: int
    goal: int
    facing: int


def zero_shot() -> list[Published]:
    """The eight mazes, then those rotations and reflections that are other mazes (`NAME_1` ...)."""
    maps = yaml.safe_load(Path(__file__).with_name("zero_shot.yaml").read_text())
    published = [_read(name, lines.split()) for name, lines in maps.items()]
    mazes = {_layout(maze): maze for maze in published}
    for maze in published:
        for number in range(1, 8):
            other = _turned(maze, number % 4, number > 3)
            mazes.setdefault(_layout(other), replace(other, name=f"{maze.name}_{number}"))
    return list(mazes.values())


def _turned(maze: Published, quarters: int, mirrored: bool) -> Published:
    """Turned to the left by `quarters` of a turn, then mirrored left to right."""
    cells = np.rot90(np.arange(SIDE**2).reshape(SIDE, SIDE), quarters)
    facing = (maze.facing - quarters) % 4
    if mirrored:
        cells = cells[:, ::-1]
        facing = (2 - facing) % 4
    place = np.argsort(cells.ravel())  # where each cell goes
    walls = maze.walls.ravel()[cells]
    return Published(maze.name, walls, int(place[maze.start]), int(place[maze.goal]), facing)


def _layout(maze: Published) -> tuple[bytes, int, int]:
    return maze.walls.tobytes(), maze.start, maze.goal


def _read(name: str, lines: list[str]) -> Published:
    text = "".join(lines)
    start = next(at for at, mark in enumerate(text) if mark in HEADINGS)
    walls = np.array([[mark == "#" for mark in line] for line in lines])
    return Published(name, walls, start, text.index("G"), HEADINGS.index(text[start]))


Walls = NDArray[np.bool_]
LABYRINTHS = 20


@dataclass(frozen=True)
class Maze:
    """`walls` [S, S], by row and column; `start` and `goal` are cells (row * S + column)."""

    name: str
    walls: Walls
    start: int
    goal: int


def mazes(side: int, random: np.random.Generator) -> list[Maze]:
    """The hand-made mazes in both directions, then the labyrinths from a free cell to the farthest
    one.
    """
    hand = [corridors(side), comb(side), four_rooms(side), rings(side), pillars(side)]
    back = [Maze(f"{maze.name}_back", maze.walls, maze.goal, maze.start) for maze in hand]
    dug = [labyrinth(side, random, f"labyrinth_{i}") for i in range(LABYRINTHS)]
    return hand + back + dug


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
    """A cell that takes the most steps to get to."""
    return int(distances(walls[None], np.array([start])).argmax())
