"""A MiniGrid view or level in words, and captions of what changed between two observations.

Captions have the style of NetHack's messages: "you picked up the yellow key". They are derived from
the cell ahead and the agent's own cell (which holds the carried object), so they use only what the
agent observes, and work on stored transitions. Most steps have none, and neither has reaching a
goal or lava: the environment's reward already contains it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors

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


Code = tuple[int, ...]
THINGS = tuple(KIND[word] for word in ("key", "ball", "box"))
DOOR = KIND["door"]
BOX = KIND["box"]
OPEN = STATES.index("open")
LOCKED = STATES.index("locked")


def happened(before: Tensors, after: Tensors) -> list[str]:
    """A sentence for each of B transitions, "" where there is none.

    `before` and `after` hold `cells` [B, S, S, 3] and `direction` [B] of the same episode.
    ConfigError if a wrapper removed them.
    """
    if not {"cells", "direction"} <= before.keys():
        raise ConfigError(
            "event captions of MiniGrid need its cells: remove the wrappers that change them"
        )
    turned = (before["direction"] != after["direction"]).cpu().numpy()[:, None]
    codes = np.concatenate([_near(before), _near(after), turned.astype(np.uint8)], 1)
    return [_said(code.tobytes()) for code in codes]


def _near(view: Tensors) -> NDArray[np.uint8]:
    """Hand and cell ahead [B, 6]."""
    cells = view["cells"].cpu().numpy()
    half = cells.shape[1] // 2
    last = cells.shape[2] - 1
    return np.concatenate([cells[:, half, last], cells[:, half, last - 1]], 1)


@lru_cache(maxsize=65536)
def _said(code: bytes) -> str:
    hand, ahead, held, now = (tuple(code[i : i + 3]) for i in (0, 3, 6, 9))
    if hand != held:
        if held[0] in THINGS:
            return f"you picked up the {named(list(held))}"
        return f"you put down the {named(list(hand))}" if hand[0] in THINGS else ""
    return "" if ahead == now else _changed(ahead, now, bool(code[12]))


def _changed(ahead: Code, now: Code, turned: bool) -> str:
    """The cell ahead is another one, or has changed where it is."""
    if not turned and ahead[0] == DOOR:
        colour = COLOURS[ahead[1]]
        if now[:2] != ahead[:2]:
            return f"you stepped into the doorway of the {colour} door"
        if now[2] == OPEN:
            return f"you {'unlocked' if ahead[2] == LOCKED else 'opened'} the {colour} door"
        return f"you closed the {colour} door"
    if not turned and ahead[0] == BOX:
        found = f" and found the {named(list(now))} in it" if now[0] in THINGS else ""
        return f"you opened the {COLOURS[ahead[1]]} box{found}"
    return f"you face the {named(list(now))}" if now[0] in (*THINGS, DOOR) else ""
