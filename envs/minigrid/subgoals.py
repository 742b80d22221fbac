"""Subgoals of MiniGrid levels given as a position, an object or a sentence, and their checks.

    position   "reach (3, 4)"            the agent is on that cell, or the cell's content changes
    object     "the yellow key"          one such object changes, or the agent is on its cell
    language   "unlock the yellow door"  that happens in the step

Source: Words as Beacons (Ruiz-Gonzalez et al., 2024). A subgoal is a `Code` of three numbers, so
the subgoals of all envs are checked in one batch.

The planner gives an ordered list of subtasks, not of actions. It searches the cheapest path to the
target as if doors were open; a locked door on the path adds the subtask of fetching its key.
Supported missions end at a goal, with a picked-up object, or with an opened door; keys must lie in
the open (not in boxes).
"""

from __future__ import annotations

import heapq
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from embodied.core.tensors import Tensors
from embodied.envs.minigrid.describe import COLOURS, KIND, described_whole, listed

Grid = list[list[list[int]]]
Cell = tuple[int, int]
WALL, DOOR, KEY, GOAL_KIND, LAVA = (KIND[word] for word in ("wall", "door", "key", "goal", "lava"))
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
        places = [cell for cell, code in cells.items() if code[0] == GOAL_KIND]
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


Kind = Literal["position", "object", "language"]
KINDS: tuple[str, ...] = get_args(Kind)
Code = tuple[int, int, int]
CELL, THING, PICK, DROP, OPEN, UNLOCK, CLOSE, GOAL, FACE = range(9)
WORD = {word: KIND[word] for word in ("key", "ball", "box", "door")}
STEPS = torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]])  # what forward adds, by turn
COLOUR = f"({'|'.join(COLOURS)})"
OBJECTS = ("key", "ball", "box")
OBJECT = f"({'|'.join(OBJECTS)})"
FORMS: tuple[tuple[str, int], ...] = (
    (r"reach \((\d+), (\d+)\)", CELL),
    (rf"the {COLOUR} (key|ball|box|door)", THING),
    (r"the goal", GOAL),
    (rf"pick up the {COLOUR} {OBJECT}", PICK),
    (rf"drop the {COLOUR} {OBJECT}", DROP),
    (rf"open the {COLOUR} (door)", OPEN),
    (rf"unlock the {COLOUR} (door)", UNLOCK),
    (rf"close the {COLOUR} (door)", CLOSE),
    (r"get to the goal", GOAL),
    (rf"go to the {COLOUR} (key|ball|box|door)", FACE),
)
SAID = {
    "position": "a cell that the agent should stand on or change: reach (X, Y)",
    "object": "a thing that it should use: the COLOUR key, ball, box or door; the goal",
    "language": "pick up the COLOUR THING; drop the COLOUR THING; unlock the COLOUR door; open the "
    "COLOUR door; go to the COLOUR THING; get to the goal",
}


class Guide:
    """Subgoals of one environment for rewards: the language-model question for a level, the
    oracle's answer, the meaning of a sentence in a level, and whether it was reached.

    `whole` has `grid` and `agent` of all envs; `limit` is the longest episode (0: depends on the
    mission).
    """

    highest: Code = (FACE, KIND["goal"], len(COLOURS) - 1)

    def __init__(self, limit: int, missions: Callable[[], list[str]]) -> None:
        self.limit = limit
        self.missions = missions

    def question(self, kind: Kind, whole: Tensors, row: int) -> str:
        return asked(kind, whole, row, self.missions()[row])

    def oracle(self, kind: Kind, whole: Tensors, row: int) -> list[str]:
        return told_by_planner(kind, whole, row, self.missions()[row])

    def understood(self, text: str, whole: Tensors, row: int) -> Code | None:
        return understood(text, whole, row)

    def mistaken(self, kind: Kind, text: str, whole: Tensors, row: int, seed: int) -> str:
        return mistaken(kind, text, whole, row, random.Random(seed))

    def reached(self, codes: Tensor, before: Tensors, after: Tensors) -> Tensor:
        return reached(codes, before, after)


def asked(kind: Kind, whole: Tensors, row: int, mission: str) -> str:
    """The question to a language model about one level. Only position subgoals need a map;
    otherwise the list of objects is enough, and levels with the same list share one question.
    """
    grid = whole["grid"][row].cpu().numpy()
    agent = whole["agent"][row].cpu().numpy()
    things = sorted({listed(cell) for cell in grid.reshape(-1, 3) if _matters(cell.tolist())})
    there = described_whole(grid, agent) if kind == "position" else f"There is {', '.join(things)}."
    if kind == "position":
        walls = (grid[..., 0] == KIND["wall"]).nonzero()
        there += " Walls: " + " ".join(f"({x}, {y})" for x, y in zip(*walls, strict=True)) + "."
    return f"Mission: {mission}.\n{there}\nSubgoals have the form: {SAID[kind]}."


def told_by_planner(kind: Kind, whole: Tensors, row: int, mission: str) -> list[str]:
    """The subgoals from a planner on the whole level; empty if it finds no plan."""
    grid = whole["grid"][row].tolist()
    said = [_said(aim, kind) for aim in plan(grid, whole["agent"][row].tolist(), mission)]
    return [text for text in said if text]


def understood(text: str, whole: Tensors, row: int) -> Code | None:
    """The subgoal that `text` names in this level; None if no such object exists."""
    code = parsed(text)
    there = code is not None and _there(code, whole["grid"][row], whole["agent"][row])
    return code if there else None


def parsed(text: str) -> Code | None:
    """The subgoal that `text` is in any level; None if the form is unknown."""
    for pattern, form in FORMS:
        found = re.fullmatch(pattern, text.strip().rstrip(".").lower())
        if found is None:
            continue
        parts = found.groups()
        if form == CELL:
            return form, int(parts[0]), int(parts[1])
        return (form, WORD[parts[1]], COLOURS.index(parts[0])) if parts else (form, KIND["goal"], 0)
    return None


def possible(whole: Tensors, row: int = 0) -> tuple[str, ...]:
    """The subgoals that apply to the current level of env `row`, regardless of difficulty.

    A locked door can be unlocked where a key of its colour exists; reaching single cells always
    applies and is not listed.
    """
    grid = whole["grid"][row].flatten(0, 1).tolist()
    agent = whole["agent"][row].tolist()
    kind_of = {place: word for word, place in KIND.items()}
    held = (kind_of[agent[3]], COLOURS[agent[4]])
    there = {(kind_of[kind], COLOURS[colour], state) for kind, colour, state in grid}
    keys = {colour for kind, colour, _ in there if kind == "key"}
    keys |= {held[1]} if held[0] == "key" else set()
    found: set[str] = set()
    for kind, colour, state in there:
        if kind in OBJECTS:
            found |= {f"go to the {colour} {kind}", f"pick up the {colour} {kind}"}
        if kind == "box":
            found.add(f"open the {colour} box")
        if kind == "door":
            found.add(f"go to the {colour} door")
            verb = ("close", "open", "unlock")[state]
            if state != LOCKED or colour in keys:
                found.add(f"{verb} the {colour} door")
        if kind == "goal":
            found.add("get to the goal")
    if held[0] in OBJECTS:
        found.add(f"drop the {held[1]} {held[0]}")
    return tuple(sorted(found))


def mistaken(kind: Kind, text: str, whole: Tensors, row: int, chance: random.Random) -> str:
    """A wrong subgoal instead of `text`: a cell some steps away (perhaps a wall), or another
    object.
    """
    if kind == "position":
        x, y = (int(number) for number in re.findall(r"\d+", text))
        off = max(1, round(chance.gauss(3.0, 1.0)))
        across = chance.randint(-off, off)
        down = chance.choice((-1, 1)) * (off - abs(across))
        return f"reach ({max(x + across, 0)}, {max(y + down, 0)})"
    cells = whole["grid"][row].flatten(0, 1).tolist()
    options = possible(whole, row) if kind == "language" else sorted(map(_named, _things(cells)))
    wrong = [option for option in options if option != text]
    return chance.choice(wrong) if wrong else text


def reached(codes: Tensor, before: Tensors, after: Tensors) -> Tensor:
    """Whether the subgoal `codes` [B, 3] of each env is reached between `before` and `after`
    (`grid` [B, W, H, 3] and `agent` [B, 5] of whole levels): [B] (bool).
    """
    old, new = before["grid"], after["grid"]
    held = before["agent"][:, 3:]
    holds = after["agent"][:, 3:]
    form = codes[:, 0]
    thing = codes[:, 1:]
    every = torch.arange(len(codes), device=codes.device)
    changed = (old != new).any(3)
    place = after["agent"][:, :2]
    ahead = place + STEPS.to(place.device)[after["agent"][:, 2]]
    such = (old[..., :2] == thing[:, None, None]).all(3)
    was = old[..., 2]
    now = new[..., 2]
    opened = such & (was != 0) & (now == 0) & changed
    limit = torch.tensor(old.shape[1:3], device=codes.device) - 1
    cell = torch.minimum(thing, limit)
    on = new[every, place[:, 0], place[:, 1]]
    had = (held == thing).all(1)
    has = (holds == thing).all(1)
    happens = torch.stack(
        [
            (place == thing).all(1) | changed[every, cell[:, 0], cell[:, 1]],
            (such & changed).flatten(1).any(1) | (on[:, :2] == thing).all(1),
            has & ~had,
            had & ~has,
            opened.flatten(1).any(1),
            (opened & (was == 2)).flatten(1).any(1),
            (such & (was == 0) & (now == 1)).flatten(1).any(1),
            on[:, 0] == KIND["goal"],
            (new[every, ahead[:, 0], ahead[:, 1], :2] == thing).all(1),
        ]
    )
    return happens[form, every]


def _said(aim: Aim, kind: Kind) -> str:
    named = "goal" if aim.kind == KIND["goal"] else f"{COLOURS[aim.colour]} {_word(aim.kind)}"
    if kind == "language":
        return "get to the goal" if aim.verb == "get to" else f"{aim.verb} the {named}"
    if aim.verb == "drop":
        return ""  # it has no cell, and things that are dropped are where the agent wants them
    return f"reach ({aim.x}, {aim.y})" if kind == "position" else f"the {named}"


def _word(kind: int) -> str:
    return next(word for word, place in KIND.items() if place == kind)


def _there(code: Code, grid: Tensor, agent: Tensor) -> bool:
    form, first, second = code
    if form == CELL:
        inside = first < grid.shape[0] and second < grid.shape[1]
        return inside and int(grid[first, second, 0]) != KIND["wall"]
    if form == GOAL:
        return bool((grid[..., 0] == first).any())
    such = (grid[..., 0] == first) & (grid[..., 1] == second)
    return bool(such.any()) or agent[3:].tolist() == [first, second]


def _matters(cell: list[int]) -> bool:
    """Things to use; a door that only has to be pushed is no obstacle."""
    plain = cell[0] in (KIND["door"],) and cell[2] != 2
    return cell[0] in (*WORD.values(), KIND["goal"]) and not plain


def _things(cells: list[list[int]]) -> set[tuple[int, int]]:
    return {(kind, colour) for kind, colour, _ in cells if kind in (*WORD.values(), KIND["goal"])}


def _named(thing: tuple[int, int]) -> str:
    return "the goal" if thing[0] == KIND["goal"] else f"the {COLOURS[thing[1]]} {_word(thing[0])}"
