"""Saves the complete state of a Crafter game as fixed-size arrays and restores it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embodied.envs.crafter.life import PLAYER, Thing
from embodied.envs.crafter.player import Player
from embodied.envs.crafter.rules import CELLS, CHUNK_CELLS, CHUNK_OF, SIDE, WAYS
from embodied.envs.crafter.world import World, daylight

Arrays = dict[str, NDArray]

MANY = SIDE * SIDE  # a cell holds one thing
NOBODY = -1
NO_CHUNK = 255
VITALS = ("hunger", "thirst", "fatigue", "recover")


def read(world: World) -> Arrays:
    """Everything that continues `world` exactly. Leaves:

    `cells`; `things` [4096, 6] in the order of their turns (kind, cell, health, clock, way, place
    in its chunk; kind -1: none); `chunks` [36] in the order in which they were first entered;
    `generator` [625]; `inventory`; `achieved`; `vitals`; `numbers`; `age`, the steps that count for
    the time limit (`numbers` has the time of day).
    """
    player = world.player
    rank = {thing: place for things in world.chunks.values() for place, thing in enumerate(things)}
    things = np.full((MANY, 6), NOBODY, np.int32)
    for row, t in enumerate(world.things):
        way = WAYS.index(t.way) if t.way else NOBODY
        things[row] = t.kind, t.at, t.health, t.clock, way, rank[t]
    chunks = np.full(len(CHUNK_CELLS), NO_CHUNK, np.uint8)
    chunks[: len(world.chunks)] = list(world.chunks)
    clock = (world.seed, world.episode, world.clock, world.before, player.before, player.sleeping)
    return {
        "cells": np.frombuffer(world.cells, np.uint8).copy(),
        "things": things,
        "chunks": chunks,
        "generator": np.array(world.generator.getstate()[1], np.int64),
        "inventory": np.array(player.inventory, np.int64),
        "achieved": np.array(player.achieved, np.int64),
        "vitals": np.array([getattr(player, name) for name in VITALS]),
        "numbers": np.array(clock, np.int64),
        "age": np.array(world.clock - world.began),
    }


def write(world: World, state: Arrays) -> None:
    """Restore into `world` the state from `read`."""
    world.cells = bytearray(state["cells"].astype(np.uint8).tobytes())
    if len(world.cells) != CELLS:
        raise ValueError(
            f"a Crafter map must have {CELLS} cells (border included), got {len(world.cells)}"
        )
    world.set_random((3, tuple(state["generator"].tolist()), None))
    world.empty()
    numbers = state["numbers"].tolist()
    world.seed, world.episode, world.clock, world.before, health, sleeping = numbers
    # Older states have no age: their episodes began with the first day.
    world.began = world.clock - int(state["age"]) if "age" in state else 0
    world.light = daylight(world.clock)
    lines = [line for line in state["things"].tolist() if line[0] != NOBODY]
    made = [_thing(line) for line in lines]
    player = made[0]
    if not isinstance(player, Player):
        raise ValueError("the first object of a Crafter game must be the player")
    world.player = player
    player.inventory[:] = state["inventory"].tolist()
    player.achieved[:] = state["achieved"].tolist()
    for name, value in zip(VITALS, state["vitals"].tolist(), strict=True):
        setattr(player, name, value)
    player.before = health
    player.sleeping = bool(sleeping)
    world.unlocked = [count > 0 for count in player.achieved]
    for thing in made:
        world.add(thing)
    order = [chunk for chunk in state["chunks"].tolist() if chunk != NO_CHUNK]
    world.chunks = {chunk: {} for chunk in order}
    for _, thing in sorted(zip(lines, made, strict=True), key=lambda pair: pair[0][5]):
        world.chunks[CHUNK_OF[thing.at]][thing] = None


def _thing(line: list[int]) -> Thing:
    kind, at, health, clock, way, _ = line
    direction = WAYS[way] if way != NOBODY else 0
    if kind == PLAYER:
        player = Player(at)
        player.way = direction
        return player
    thing = Thing(kind, at, direction)
    thing.health = health
    thing.clock = clock
    return thing
