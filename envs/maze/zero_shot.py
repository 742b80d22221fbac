"""The literature's zero-shot evaluation mazes of 13 x 13 cells, by name.

Maps of Dennis et al. (2020) and Jiang et al. (2021), as evaluated by JaxUED (Coward et al., 2024).
`SixteenRooms2` is SixteenRoomsFewerDoors. `#`: wall, `G`: goal, `> v < ^`: start and heading.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

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
    published = [_read(name, lines.split()) for name, lines in MAPS.items()]
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


MAPS = {
    "SixteenRooms": """
        ...#..#..#...
        .>.......#...
        ...#..#......
        #.###.##.###.
        ...#.........
        ......#..#...
        ##.#.##.###.#
        ...#.....#...
        ...#..#......
        .####.##.#.##
        ...#..#..#...
        ......#....G.
        ...#.....#...
    """,
    "SixteenRooms2": """
        ...#.....#...
        .>....#..#...
        ...#..#..#...
        ####.##.###.#
        ...#..#......
        ......#..#...
        #.#####.#####
        ...#..#..#...
        ...#.........
        ##.##.##.####
        ...#..#..#...
        ......#....G.
        ...#..#..#...
    """,
    "Labyrinth": """
        .............
        .###########.
        .#.........#.
        .#.#######.#.
        .#.#.....#.#.
        .#.#.###.#.#.
        .#.#.#G#.#.#.
        .#.#.#.#.#.#.
        .#...#...#.#.
        .#########.#.
        .....#.....#.
        ####.#.#####.
        >....#.......
    """,
    "LabyrinthFlipped": """
        .............
        .###########.
        .#.........#.
        .#.#######.#.
        .#.#.....#.#.
        .#.#.###.#.#.
        .#.#.#G#.#.#.
        .#.#.#.#.#.#.
        .#.#...#...#.
        .#.#########.
        .#.....#.....
        .#####.#.####
        .......#....<
    """,
    "Labyrinth2": """
        >#...........
        .#.#########.
        .#.#.......#.
        .#.#.#####.#.
        .#.#.#...#.#.
        ...#.#.#.#.#.
        ####.#G#.#.#.
        ...#.###.#.#.
        .#.#.....#.#.
        .#.#######.#.
        .#.........#.
        .###########.
        .............
    """,
    "StandardMaze": """
        .....#>...#..
        .###.####.##.
        .#...........
        .########.###
        ........#....
        ######.#####.
        ....#..#.....
        .##...##.####
        ..#.#..#...#.
        #.#.##.###.#.
        #.#..#...#...
        #.##.###.###.
        ...#..G#.#...
    """,
    "StandardMaze2": """
        ...#.#....#..
        .#.#.####...#
        .#........#..
        .########.###
        ...#..#.#.#.G
        ##.#.##.#.#..
        >#.#....#.##.
        .#.##.###..#.
        .#..#..###.#.
        .##.##.#.#.#.
        .#...#.#.#.#.
        .#.#.#.#.#.#.
        ...#...#.....
    """,
    "StandardMaze3": """
        ...>#.#......
        .####.#.####.
        .#....#.#....
        ...####.#.#.#
        ##.#....#.#..
        ...#.##.#.##.
        .#.#.#..#..#G
        .#.#.#.###.##
        .#...#.#.#...
        .###.#.#.###.
        .#...#.#...#.
        .#.###.#.#.#.
        .#...#...#...
    """,
}
