"""Subgoals of MiniGrid levels given as a position, an object or a sentence, and their checks.

    position   "reach (3, 4)"            the agent is on that cell, or the cell's content changes
    object     "the yellow key"          one such object changes, or the agent is on its cell
    language   "unlock the yellow door"  as defined in `embodied.envs.minigrid.subgoal_sentences`

Source: Words as Beacons (Ruiz-Gonzalez et al., 2024). A subgoal is a `Code` of three numbers, so
the subgoals of all envs are checked in one batch.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from embodied.core.tensors import Tensors
from embodied.envs.minigrid.describe import COLOURS, KIND, described_whole, listed
from embodied.envs.minigrid.planner import Aim, plan
from embodied.envs.minigrid.subgoal_sentences import STEPS, possible

Kind = Literal["position", "object", "language"]
KINDS: tuple[str, ...] = get_args(Kind)
Code = tuple[int, int, int]
CELL, THING, PICK, DROP, OPEN, UNLOCK, CLOSE, GOAL, FACE = range(9)
WORD = {**{word: KIND[word] for word in ("key", "ball", "box", "door")}}
COLOUR = f"({'|'.join(COLOURS)})"
OBJECT = "(key|ball|box)"
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
        there += " Walls: " + " ".join(_walls(grid.tolist())) + "."
    return f"Mission: {mission}.\n{there}\nSubgoals have the form: {SAID[kind]}."


def told_by_planner(kind: Kind, whole: Tensors, row: int, mission: str) -> list[str]:
    """The subgoals from a planner on the whole level; empty if it finds no plan."""
    grid = whole["grid"][row].tolist()
    agent = whole["agent"][row].tolist()
    said = [_said(aim, kind) for aim in plan(grid, agent, mission)]
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
        if found is not None:
            return _code(form, found.groups())
    return None


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


def _code(form: int, parts: tuple[str, ...]) -> Code:
    if form == CELL:
        return form, int(parts[0]), int(parts[1])
    return (form, WORD[parts[1]], COLOURS.index(parts[0])) if parts else (form, KIND["goal"], 0)


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


def _walls(grid: list[list[list[int]]]) -> list[str]:
    return [
        f"({x}, {y})"
        for x, column in enumerate(grid)
        for y, cell in enumerate(column)
        if cell[0] == KIND["wall"]
    ]
