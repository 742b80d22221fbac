"""Saves and restores the exact state of a MiniGrid environment: grid, boxes, agent, generator.

Environment classes have additional attributes (target position, the door to open); those that
MiniGrid's classes use at runtime are listed here by name. Objects are saved by position, because
MiniGrid compares them by identity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from minigrid.core.constants import COLOR_TO_IDX, IDX_TO_OBJECT, OBJECT_TO_IDX
from minigrid.core.grid import Grid
from minigrid.core.world_object import Box, WorldObj
from minigrid.minigrid_env import MiniGridEnv
from numpy.typing import NDArray

from embodied.core.env import NotSavable
from embodied.envs.saved_state import pack, unpack

Arrays = dict[str, NDArray[Any]]
NOTHING = (OBJECT_TO_IDX["empty"], 0, 0)
POINTS = ("target_pos", "success_pos", "failure_pos", "move_pos", "goal_pos")
THINGS = ("obj", "door", "red_door", "blue_door")
LISTS = ("obstacles",)
TEXTS = ("target_color", "target_type", "targetColor", "targetType", "move_type", "moveColor")
LETTERS = {"mission": 256, **dict.fromkeys(TEXTS, 16)}
KNOWN = ("minigrid.envs.", "embodied.envs.minigrid.levels")


def read(world: MiniGridEnv, name: str) -> Arrays:
    """The complete state of `world`; NotSavable if its class is unknown."""
    require_savable(world, name)
    places = {id(thing): place for place, thing in enumerate(world.grid.grid) if thing is not None}
    if world.carrying is not None:
        places[id(world.carrying)] = len(world.grid.grid)
    marks: Arrays = {}
    for key in (key for key in POINTS if _has(world, key)):
        marks[key] = np.array(getattr(world, key), np.int64)
    for key in (key for key in THINGS if _has(world, key)):
        marks[key] = np.array(places.get(id(getattr(world, key)), -1))
    for key in (key for key in LISTS if _has(world, key)):
        marks[key] = np.array([places.get(id(thing), -1) for thing in getattr(world, key)])
    for key in (key for key in LETTERS if _has(world, key)):
        # A text as [count] bytes, zeros after its end.
        text = getattr(world, key)
        count = LETTERS[key]
        letters = text.encode()
        if len(letters) > count:
            raise NotSavable(f"{text!r} is longer than {count} characters")
        marks[key] = np.frombuffer(letters.ljust(count, b"\0"), np.uint8).copy()
    return {**symbols(world), **marks, "generator": pack(world.np_random)}


def write(world: MiniGridEnv, row: Arrays, name: str) -> None:
    """Restore a state from `read` into `world`, which must have been reset once."""
    require_savable(world, name)
    things = load(world, row)
    for key in row:
        if key in POINTS:
            setattr(world, key, tuple(int(number) for number in row[key]))
        elif key in THINGS:
            setattr(world, key, things[int(row[key])])
        elif key in LISTS:
            setattr(world, key, [things[int(place)] for place in row[key]])
        elif key in LETTERS:
            setattr(world, key, row[key].tobytes().rstrip(b"\0").decode())
    unpack(world.np_random, row["generator"])


def symbols(world: MiniGridEnv) -> Arrays:
    """What every MiniGrid world has: `grid` and `inside` [W, H, 3] (kind, colour, state of each
    cell and of what its box holds), `agent` (x, y, turn), `hand` [2, 3] (what it carries, and what
    is in that), `clock` (steps taken, steps allowed)."""
    grid = world.grid
    codes = np.array([_code(thing) for thing in grid.grid], np.uint8)
    inside = np.array([_code(getattr(thing, "contains", None)) for thing in grid.grid], np.uint8)
    shape = (grid.height, grid.width, 3)
    hand = world.carrying or None
    held = None if hand is None else hand.contains
    x, y = world.agent_pos
    return {
        "grid": codes.reshape(shape).transpose(1, 0, 2),
        "inside": inside.reshape(shape).transpose(1, 0, 2),
        "agent": np.array([x, y, world.agent_dir], np.int64),
        "hand": np.array([_code(hand), _code(held)], np.uint8),
        "clock": np.array([world.step_count, world.max_steps], np.int64),
    }


def load(world: MiniGridEnv, row: Arrays) -> list[WorldObj | None]:
    """Put what `symbols` says into `world`; returns its objects: the cells, the hand, and None."""
    grid = row["grid"].transpose(1, 0, 2)
    inside = row["inside"].transpose(1, 0, 2)
    height, width, _ = grid.shape
    world.grid = Grid(width, height)
    world.grid.grid = [
        _thing(code, held)
        for code, held in zip(
            grid.reshape(-1, 3).tolist(), inside.reshape(-1, 3).tolist(), strict=True
        )
    ]
    for place, thing in enumerate(world.grid.grid):
        if thing is not None:
            thing.cur_pos = thing.init_pos = (place % width, place // width)
    hand, held = row["hand"].tolist()
    world.carrying = _thing(hand, held)
    if world.carrying is not None:
        world.carrying.cur_pos = np.array([-1, -1])  # pyright: ignore[reportAttributeAccessIssue]
    x, y, turn = (int(number) for number in row["agent"])
    world.agent_pos = (x, y)
    world.agent_dir = turn
    world.step_count, world.max_steps = (int(number) for number in row["clock"])
    return [*world.grid.grid, world.carrying, None]


def require_savable(world: MiniGridEnv, name: str) -> None:
    """NotSavable unless all runtime attributes of the environment's class are listed here."""
    own = type(world).__module__
    if not own.startswith(KNOWN) or own.startswith("minigrid.envs.babyai"):
        raise NotSavable(
            f"{name} cannot save its state: only MiniGrid's own environments (not BabyAI's) and "
            "embodied.envs.minigrid.levels can; episodes in flight restart on resume"
        )


def _has(world: MiniGridEnv, key: str) -> bool:
    return getattr(world, key, None) is not None


def _code(thing: WorldObj | None) -> tuple[int, int, int]:
    return NOTHING if thing is None else thing.encode()


def _thing(code: list[int], held: list[int]) -> WorldObj | None:
    """An object; WorldObj.decode forgets a goal's colour and a box's contents."""
    thing = WorldObj.decode(*code)
    if thing is None:
        return None
    thing.color = next(word for word, place in COLOR_TO_IDX.items() if place == code[1])
    if isinstance(thing, Box) and IDX_TO_OBJECT[held[0]] not in ("unseen", "empty"):
        thing.contains = _thing(held, list(NOTHING))
    return thing
