"""High-level planner for MiniGrid levels: an ordered list of subtasks, not of actions.

It searches the cheapest path to the target as if doors were open; a locked door on the path adds
the subtask of fetching its key. Supported missions end at a goal, with a picked-up object, or with
an opened door; keys must lie in the open (not in boxes).
"""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass

from embodied.envs.minigrid.describe import COLOURS, KIND

Grid = list[list[list[int]]]
Cell = tuple[int, int]
WALL, DOOR, KEY, GOAL, LAVA = (KIND[word] for word in ("wall", "door", "key", "goal", "lava"))
THINGS = tuple(KIND[word] for word in ("key", "ball", "box"))
CLOSED = 1
LOCKED = 2
ASIDE = 8  # what it costs to move a thing out of the way
DEEP = 6  # errands for errands


@dataclass(frozen=True)
class Aim:
    """`verb` ("pick up", "drop", "open", "unlock", "get to") a thing that is at (x, y)."""

    verb: str
    kind: int
    colour: int
    x: int
    y: int


def plan(grid: Grid, agent: list[int], mission: str) -> list[Aim]:
    """The errands of the level `grid` [W, H, 3] for an agent (x, y, turn, kind and colour of what
    it carries); none where the mission or the level is beyond this planner."""
    target = _target(grid, mission)
    if target is None:
        return []
    (x, y), verb = target
    aims = _aims_between(grid, (agent[0], agent[1]), (x, y), (agent[3], agent[4]), verb, 0)
    return list(dict.fromkeys(aims or ()))  # a door that is open already is no errand any more


def _target(grid: Grid, mission: str) -> tuple[Cell, str] | None:
    cells = {(x, y): cell for x, column in enumerate(grid) for y, cell in enumerate(column)}
    colours = "|".join(COLOURS)
    picked = re.search(rf"(?:pick up|fetch|get|go get) (?:the|a) ({colours}) (\w+)$", mission)
    if picked is not None and KIND.get(picked[2]) in THINGS:
        wanted = (KIND[picked[2]], COLOURS.index(picked[1]))
        verb = "pick up"
        places = [cell for cell, code in cells.items() if tuple(code[:2]) == wanted]
    elif "goal" in mission:
        verb = "get to"
        places = [cell for cell, code in cells.items() if code[0] == GOAL]
    elif mission == "open the door":
        verb = "open"
        places = [cell for cell, code in cells.items() if code[0] == DOOR]
    else:
        return None
    return (places[0], verb) if places else None


def _aims_between(
    grid: Grid, start: Cell, target: Cell, hand: tuple[int, int], verb: str, depth: int
) -> list[Aim] | None:
    """The aims between `start` and the target, which is the last one."""
    way = _way(grid, start, target)
    if way is None or depth > DEEP:
        return None
    aims: list[Aim] = []
    for x, y in way:
        kind, colour, state = grid[x][y]
        if kind != DOOR or state not in (CLOSED, LOCKED):
            continue
        if state == LOCKED and hand != (KEY, colour):
            fetched = _aims_to_fetch_key(grid, start, colour, (x, y), depth)
            if fetched is None:
                return None
            # The aims after the key was fetched: it is in hand, and the doors on the way to it are
            # open.
            key = fetched[1]
            free = [[list(cell) for cell in column] for column in grid]
            free[key[0]][key[1]] = [KIND["empty"], 0, 0]
            return fetched[0] + (
                _aims_between(free, key, target, (KEY, colour), verb, depth + 1) or []
            )
        aims.append(Aim("unlock" if state == LOCKED else "open", DOOR, colour, x, y))
    x, y = target
    kind, colour, _ = grid[x][y]
    if kind == DOOR:
        return aims  # opening it is the last thing that was said
    if verb == "pick up" and hand[0] in THINGS:
        aims.append(Aim("drop", *hand, *target))
    return [*aims, Aim(verb, kind, colour, x, y)]


def _aims_to_fetch_key(
    grid: Grid, start: Cell, colour: int, door: Cell, depth: int
) -> tuple[list[Aim], Cell] | None:
    """The aims that get a key of this colour without passing the door, and where it was."""
    for x, column in enumerate(grid):
        for y, cell in enumerate(column):
            if cell[:2] == [KEY, colour]:
                shut = [[list(c) for c in col] for col in grid]
                shut[door[0]][door[1]] = [WALL, 0, 0]
                aims = _aims_between(shut, start, (x, y), (1, 0), "pick up", depth + 1)
                if aims is not None:
                    return aims, (x, y)
    return None


def _way(grid: Grid, start: Cell, target: Cell) -> list[Cell] | None:
    """The cells of a cheapest way from `start` to `target`, both included; None: there is none."""
    queue: list[tuple[int, Cell]] = [(0, start)]
    came: dict[Cell, Cell | None] = {start: None}
    costs = {start: 0}
    while queue:
        cost, cell = heapq.heappop(queue)
        if cell == target:
            way = [cell]
            while (before := came[way[-1]]) is not None:
                way.append(before)
            return way[::-1]
        if cost > costs[cell]:
            continue
        for dx, dy in ((1, 0), (0, 1), (-1, 0), (0, -1)):
            x, y = cell[0] + dx, cell[1] + dy
            if not (0 <= x < len(grid) and 0 <= y < len(grid[0])):
                continue
            kind, _, state = grid[x][y]
            if kind in (WALL, LAVA):
                continue
            beyond = (x, y) != target and kind in THINGS
            more = cost + 1 + ASIDE * beyond + (kind == DOOR and state == CLOSED)
            more += 2 * ASIDE * (kind == DOOR and state == LOCKED)
            if more < costs.get((x, y), 1 << 30):
                costs[x, y] = more
                came[x, y] = cell
                heapq.heappush(queue, (more, (x, y)))
    return None
