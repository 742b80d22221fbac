"""Language subgoals of MiniGrid levels: parses a sentence and checks whether it was reached.

A subgoal is a pure function of the whole level before and after an action, for all envs at once:

    before, after = env.whole(), (env.step(action), env.whole())[1]
    goal("pick up the yellow key").holds(before, after)       # [B] bool
    possible(env.whole(), row=0)                              # sentences that apply to the level

It also works on stored transitions if the environment has `privileged: true`:
`holds(under(under(rows, "obs"), "privileged"), under(under(rows, "next_obs"), "privileged"))`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.tensors import Tensors
from embodied.envs.minigrid.describe import COLOURS, KIND

STEPS = torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]])  # what forward adds, by turn
THINGS = ("key", "ball", "box")
OPEN, CLOSED, LOCKED = range(3)  # the states of a door


@dataclass(frozen=True)
class Goal:
    """`text` says it; `holds(before, after)` [B] (bool) is true in the step in which it is reached.

    `before` and `after` hold `grid` [B, W, H, 3] and `agent` [B, 5], as `MiniGrid.whole` does.
    """

    text: str
    holds: Callable[[Tensors, Tensors], Tensor]


def goal(text: str) -> Goal:
    """The subgoal that `text` names; ValueError lists the forms when it is none."""
    for form, make in FORMS.items():
        pattern = re.escape(form).replace("X", r"\d+").replace("Y", r"\d+")
        pattern = pattern.replace("COLOUR", f"(?:{'|'.join(COLOURS)})")
        pattern = pattern.replace("THING", f"(?:{'|'.join(THINGS)})")
        if re.fullmatch(pattern, text):
            return Goal(text, make(_numbers(text)))
    raise ValueError(f"unknown subgoal {text!r}; supported forms: {'; '.join(FORMS)}")


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
        if kind in THINGS:
            found |= {f"go to the {colour} {kind}", f"pick up the {colour} {kind}"}
        if kind == "box":
            found.add(f"open the {colour} box")
        if kind == "door":
            found.add(f"go to the {colour} door")
            able = {
                OPEN: {f"close the {colour} door"},
                CLOSED: {f"open the {colour} door"},
                LOCKED: {f"unlock the {colour} door"} if colour in keys else set(),
            }
            found |= able[state]
        if kind == "goal":
            found.add("get to the goal")
    if held[0] in THINGS:
        found.add(f"drop the {held[1]} {held[0]}")
    return tuple(sorted(found))


def reach_cell(x: int, y: int) -> Callable[[Tensors, Tensors], Tensor]:
    """The agent comes to stand on (x, y)."""

    def at(whole: Tensors) -> Tensor:
        return (whole["agent"][:, 0] == x) & (whole["agent"][:, 1] == y)

    return lambda before, after: at(after) & ~at(before)


def reach_goal(before: Tensors, after: Tensors) -> Tensor:
    """The agent comes to stand on a goal."""

    def at(whole: Tensors) -> Tensor:
        return _cell(whole["grid"], whole["agent"][:, :2])[:, 0] == KIND["goal"]

    return at(after) & ~at(before)


def go_to(kind: int, colour: int) -> Callable[[Tensors, Tensors], Tensor]:
    """The agent comes to face a thing of this kind and colour, one step away."""

    def faces(whole: Tensors) -> Tensor:
        agent = whole["agent"]
        cell = _cell(whole["grid"], agent[:, :2] + STEPS.to(agent.device)[agent[:, 2]])
        return (cell[:, 0] == kind) & (cell[:, 1] == colour)

    return lambda before, after: faces(after) & ~faces(before)


def pick_up(kind: int, colour: int) -> Callable[[Tensors, Tensors], Tensor]:
    """The agent carries such a thing now and did not before."""
    return lambda before, after: _holds(after, kind, colour) & ~_holds(before, kind, colour)


def drop(kind: int, colour: int) -> Callable[[Tensors, Tensors], Tensor]:
    """The agent carried such a thing and has put it down."""
    return lambda before, after: _holds(before, kind, colour) & ~_holds(after, kind, colour)


def turn_door(colour: int, was: tuple[int, ...], now: int) -> Callable[[Tensors, Tensors], Tensor]:
    """A door of this colour goes from a state in `was` to `now`."""

    def holds(before: Tensors, after: Tensors) -> Tensor:
        old, new = before["grid"], after["grid"]
        door = (old[..., 0] == KIND["door"]) & (old[..., 1] == colour)
        turned = (new[..., 2] == now) & (new[..., 0] == KIND["door"])
        before_it = torch.stack([old[..., 2] == state for state in was]).any(0)
        return (door & turned & before_it).flatten(1).any(1)

    return holds


def open_box(colour: int) -> Callable[[Tensors, Tensors], Tensor]:
    """A box of this colour is gone, and not into the agent's hand."""

    def count(whole: Tensors) -> Tensor:
        grid = whole["grid"]
        boxes = (grid[..., 0] == KIND["box"]) & (grid[..., 1] == colour)
        return boxes.flatten(1).sum(1) + _holds(whole, KIND["box"], colour)

    return lambda before, after: count(after) < count(before)


Numbers = tuple[int, ...]
FORMS: dict[str, Callable[[Numbers], Callable[[Tensors, Tensors], Tensor]]] = {
    "get to the goal": lambda _: reach_goal,
    "reach (X, Y)": lambda n: reach_cell(*n),
    "go to the COLOUR THING": lambda n: go_to(n[1], n[0]),
    "go to the COLOUR door": lambda n: go_to(n[1], n[0]),
    "pick up the COLOUR THING": lambda n: pick_up(n[1], n[0]),
    "drop the COLOUR THING": lambda n: drop(n[1], n[0]),
    "open the COLOUR door": lambda n: turn_door(n[0], (CLOSED, LOCKED), OPEN),
    "unlock the COLOUR door": lambda n: turn_door(n[0], (LOCKED,), OPEN),
    "close the COLOUR door": lambda n: turn_door(n[0], (OPEN,), CLOSED),
    "open the COLOUR box": lambda n: open_box(n[0]),
}


def _numbers(text: str) -> Numbers:
    """Colour and kind, or x and y, in the order of the text."""
    if "(" in text:
        return tuple(int(number) for number in re.findall(r"\d+", text))
    words = text.split()
    colours = [COLOURS.index(word) for word in words if word in COLOURS]
    kinds = [KIND[word] for word in words if word in (*THINGS, "door")]
    return (*colours, *kinds)


def _holds(whole: Tensors, kind: int, colour: int) -> Tensor:
    return (whole["agent"][:, 3] == kind) & (whole["agent"][:, 4] == colour)


def _cell(grid: Tensor, place: Tensor) -> Tensor:
    """The cells [B, 3] of `grid` [B, W, H, 3] at `place` [B, 2]."""
    return grid[torch.arange(len(grid), device=grid.device), place[:, 0], place[:, 1]]
