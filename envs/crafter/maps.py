"""Map generation of Crafter: the same terrain and creatures per seed as the `crafter` package.

Source: Crafter (Hafner, 2021). Thirteen noise fields determine the terrain. Cells that also need a
random number draw it in the package's order, so the generator ends in the same state. The noise of
a whole map is computed as one array operation; only cells that draw a number are visited one by
one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np
from numpy.typing import NDArray

from embodied.envs.crafter.noise import Noise
from embodied.envs.crafter.rules import (
    CELLS,
    COAL,
    DIAMOND,
    GRASS,
    IRON,
    LAVA,
    PATH,
    RIM,
    SAND,
    SIDE,
    STONE,
    STRIDE,
    TREE,
    WATER,
)

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# name: (height in the noise, size of the features along x, along y)
FIELDS = {
    "start": (8, 3),
    "water_wide": (3, 15),
    "water_fine": (3, 5),
    "mountain_wide": (0, 15),
    "mountain_fine": (0, 5),
    "cave": (6, 7),
    "tunnel_x": (7, 3),
    "tunnel_y": (7, 3),
    "coal": (1, 8),
    "iron": (2, 6),
    "lava": (6, 5),
    "sand": (4, 9),
    "tree": (5, 7),
}
COW = "cow"
ZOMBIE = "zombie"
SKELETON = "skeleton"


@dataclass(frozen=True, slots=True)
class Map:
    """`cells` (material of every cell, rim included), `creatures` (kind, cell) in the order of
    their birth, and the generator as the episode goes on with it."""

    cells: bytearray
    creatures: list[tuple[str, int]]
    random: Random


@dataclass(frozen=True, slots=True)
class _Terrain:
    """Flat arrays [4096], x before y: what the noise alone decides."""

    material: NDArray[np.uint8]
    tunnel: Flags
    may_coal: Flags
    may_iron: Flags
    may_diamond: Flags
    may_tree: Flags


def make(seed: int) -> Map:
    """The map of an episode's seed, the player in its middle."""
    first = np.random.RandomState(seed)
    terrain = _terrain(first.randint(0, 2**31 - 1))
    random = continued(first)
    draw = random.random
    material = bytearray(terrain.material.tobytes())
    # Trees and ores, in place.
    kinds = (terrain.may_coal, terrain.may_iron, terrain.may_diamond, terrain.may_tree)
    coal, iron, diamond, tree = (kind.tobytes() for kind in kinds)
    chance = np.logical_or.reduce(kinds)
    for cell in np.flatnonzero(chance).tolist():
        if tree[cell]:
            if draw() > 0.8:
                material[cell] = TREE
        elif coal[cell] and draw() > 0.85:
            material[cell] = COAL
        elif iron[cell] and draw() > 0.75:
            material[cell] = IRON
        elif diamond[cell] and draw() > 0.994:
            material[cell] = DIAMOND
    creatures = _settle(material, terrain.tunnel, draw)
    cells = np.zeros((STRIDE, STRIDE), np.uint8)
    inner = np.frombuffer(material, np.uint8).reshape(SIDE, SIDE)
    cells[RIM:-RIM, RIM:-RIM] = inner
    return Map(bytearray(cells.tobytes()), creatures, random)


def continued(generator: np.random.RandomState) -> Random:
    """Python's Mersenne twister where numpy's is: the same numbers, drawn ten times as fast."""
    state = generator.get_state(legacy=True)
    assert isinstance(state, tuple)
    random = Random()
    random.setstate((3, (*state[1].tolist(), int(state[2])), None))
    return random


def _settle(material: bytearray, tunnel: Flags, draw: Callable[[], float]) -> list[tuple[str, int]]:
    """Cows, zombies and skeletons where they are born."""
    now = np.frombuffer(material, np.uint8)
    grass = now == GRASS
    path = now == PATH
    distance = _grid().distance
    cow = grass & (distance > 3)
    zombie = (grass | path | (now == SAND)) & (distance > 10)
    skeleton = path & tunnel
    cows = cow.tobytes()
    zombies = zombie.tobytes()
    skeletons = skeleton.tobytes()
    born: list[tuple[str, int]] = []
    place = _grid().place
    for cell in np.flatnonzero(cow | zombie | skeleton).tolist():
        if cows[cell] and draw() > 0.985:
            born.append((COW, place[cell]))
        elif zombies[cell] and draw() > 0.993:
            born.append((ZOMBIE, place[cell]))
        elif skeletons[cell] and draw() > 0.95:
            born.append((SKELETON, place[cell]))
    return born


@dataclass(frozen=True, slots=True)
class _Grid:
    """The parts that every map shares: distances from the player's start, places, the noise."""

    distance: Floats
    place: list[int]
    noise: Noise


@cache
def _grid() -> _Grid:
    x, y = (axis.ravel() for axis in np.indices((SIDE, SIDE)))
    middle = SIDE // 2
    distance = np.sqrt((x - middle) ** 2 + (y - middle) ** 2)
    rim = np.arange(CELLS).reshape(STRIDE, STRIDE)[RIM:-RIM, RIM:-RIM]
    places = []
    for name, (height, size) in FIELDS.items():
        # Tunnels are features drawn out along one axis.
        u, v = {"tunnel_x": (2 * x, y / 5), "tunnel_y": (x / 5, 2 * y)}.get(name, (x, y))
        places.append(np.stack([u / size, v / size, np.full(len(x), float(height))], 1))
    return _Grid(distance, rim.ravel().tolist(), Noise(np.concatenate(places)))


def _terrain(seed: int) -> _Terrain:
    grid = _grid()
    values = grid.noise.at(seed).reshape(len(FIELDS), -1)
    field = dict(zip(FIELDS, values, strict=True))
    start = 4 - grid.distance
    start = start + 2 * field["start"]
    start = 1 / (1 + np.exp(-start))
    water = (field["water_wide"] + 0.15 * field["water_fine"]) + 0.1
    water = water - 2 * start
    mountain = (field["mountain_wide"] + 0.3 * field["mountain_fine"]) / 1.3
    mountain = mountain - (4 * start + 0.3 * water)
    rock = ~(start > 0.5) & (mountain > 0.15)
    cave = rock & (field["cave"] > 0.15) & (mountain > 0.3)
    tunnel = rock & ~cave & ((field["tunnel_x"] > 0.4) | (field["tunnel_y"] > 0.4))
    solid = rock & ~cave & ~tunnel
    plain = ~(start > 0.5) & ~rock
    sand = plain & (water > 0.25) & (water <= 0.35) & (field["sand"] > -0.2)
    sea = plain & ~sand & (water > 0.3)
    lava = solid & (mountain > 0.3) & (field["lava"] > 0.35)
    may_coal = solid & (field["coal"] > 0)
    may_iron = solid & (field["iron"] > 0.4)
    may_diamond = solid & (mountain > 0.18)
    kinds = ((cave | tunnel, PATH), (solid, STONE), (lava, LAVA), (sand, SAND), (sea, WATER))
    material = np.full(len(start), GRASS, np.uint8)
    for where, kind in kinds:
        material[where] = kind
    may_tree = plain & ~sand & ~sea & (field["tree"] > 0)
    return _Terrain(material, tunnel, may_coal, may_iron, may_diamond, may_tree)
