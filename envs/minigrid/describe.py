"""Text description of a MiniGrid view or level, for language models and people."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

KINDS = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
STATES = ("open", "closed", "locked")
TURNS = ("east", "south", "west", "north")
KIND = {word: place for place, word in enumerate(KINDS)}


def named(code: NDArray[np.uint8] | list[int]) -> str:
    """A cell's (kind, colour, state) in words: "locked yellow door"."""
    kind, colour, state = (int(number) for number in code)
    if KINDS[kind] == "door":
        return f"{STATES[state]} {COLOURS[colour]} door"
    if KINDS[kind] in ("key", "ball", "box", "floor"):
        return f"{COLOURS[colour]} {KINDS[kind]}"
    return KINDS[kind]


def listed(code: NDArray[np.uint8] | list[int]) -> str:
    """`named` with its article: "a locked yellow door", "an open red door", "the goal"."""
    words = named(code)
    if words in ("goal", "lava"):
        return "the goal" if words == "goal" else words
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def described(view: NDArray[np.uint8], turn: int, mission: str) -> str:
    """The text of what an agent that sees `view` [S, S, 3] (itself in the middle of the last row)
    and looks `turn` knows: mission, compass, hand, what is ahead, and each thing in view with its
    place."""
    size = len(view)
    half = size // 2
    last = size - 1
    carried = view[half, last]
    hand = "nothing" if carried[0] <= KIND["empty"] else listed(carried)
    lines = [
        f"Mission: {mission}." if mission else "",
        f"You face {TURNS[turn]} and carry {hand}.",
        _ahead(view),
    ]
    plain = {KIND[word] for word in ("unseen", "empty", "wall", "floor")}
    things = [
        (last - j + abs(i - half), f"{listed(view[i, j])} {_where(last - j, i - half)}")
        for i in range(size)
        for j in range(size)
        if (i, j) != (half, last) and int(view[i, j, 0]) not in plain
    ]
    shown = "; ".join(words for _, words in sorted(things))
    return " ".join([*filter(None, lines), f"You see {shown}." if shown else "You see no things."])


def described_whole(grid: NDArray[np.uint8], agent: NDArray[np.int64]) -> str:
    """The whole level [W, H, 3] in words: its size, the agent, each thing with its cell."""
    width, height, _ = grid.shape
    plain = {KIND[word] for word in ("unseen", "empty", "wall", "floor", "agent")}
    things = [
        f"{listed(grid[x, y])} at ({x}, {y})"
        for y in range(height)
        for x in range(width)
        if int(grid[x, y, 0]) not in plain
    ]
    x, y, turn = (int(number) for number in agent[:3])
    return (
        f"A level of {width} x {height} cells; the agent is at ({x}, {y}) and faces "
        f"{TURNS[turn]}; there is {', '.join(things) if things else 'nothing'}."
    )


def _ahead(view: NDArray[np.uint8]) -> str:
    size = len(view)
    half = size // 2
    last = size - 1
    for steps in range(1, size):
        kind = int(view[half, last - steps, 0])
        if KINDS[kind] == "wall":
            return f"A wall is {_count(steps)} ahead."
        if KINDS[kind] not in ("empty", "floor"):
            return ""
    return "The way ahead is free."


def _where(ahead: int, right: int) -> str:
    side = f"{_count(abs(right))} to the {'right' if right > 0 else 'left'}"
    if not right:
        return f"{_count(ahead)} ahead"
    return f"{_count(ahead)} ahead and {side}" if ahead else side


def _count(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"
