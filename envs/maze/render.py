"""Renders a maze as an image and as text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
