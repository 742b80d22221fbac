"""Map generation of Crafter: the same terrain and creatures per seed as the `crafter` package.

Source: Crafter (Hafner, 2021). Thirteen noise fields determine the terrain. Cells that also need a
random number draw it in the package's order, so the generator ends in the same state. The noise of
a whole map is computed as one array operation; only cells that draw a number are visited one by
one.

The noise is OpenSimplex (Spencer, 2014) in three dimensions, with the geometry precomputed. A
position p lies in a skewed cubic cell; each lattice vertex v near it, at distance d_v, contributes

    max(0, 2 - |d_v|^2)^4 (g_v . d_v),     g_v a gradient that the seed assigns to v,

and the sum is divided by 103. The vertices and distances do not depend on the seed. All
floating-point operations are those of the `opensimplex` package in the same order, so values are
bitwise equal and comparisons with a threshold always agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.envs.crafter import rules

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

STRETCH = -1.0 / 6
SQUISH = 1.0 / 3
NORM = 103
WORD = (1 << 64) - 1
HALF = 1 << 63
LOWER = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
MIDDLE = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1))
UPPER = ((1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1))
SLOTS = 8
GRADIENTS = np.array(
    [
        [high * sign for high, sign in zip(size, signs, strict=True)]
        for signs in (
            *((-1, 1, 1), (1, 1, 1), (-1, -1, 1), (1, -1, 1)),
            *((-1, 1, -1), (1, 1, -1), (-1, -1, -1), (1, -1, -1)),
        )
        for size in ((11, 4, 4), (4, 11, 4), (4, 4, 11))
    ],
    np.float64,
)


@dataclass(frozen=True)
class _Slot:
    """The k-th vertex of the places that have so many in reach: place, vertex, d, weight."""

    place: Ints
    vertex: Ints
    apart: tuple[Floats, Floats, Floats]
    weight: Floats


class Noise:
    """Noise at N fixed places [N, 3]; `at(seed)` returns the values [N] of one seed."""

    def __init__(self, places: Floats) -> None:
        self.size = len(places)
        x, y, z = places.T
        stretch = (x + y + z) * STRETCH
        skewed = np.stack([x + stretch, y + stretch, z + stretch], 1)
        cell = np.floor(skewed)
        squish = (cell[:, 0] + cell[:, 1] + cell[:, 2]) * SQUISH
        origin = places - (cell + squish[:, None])
        corner, minus = _vertices(skewed - cell)
        apart = origin[:, None] - minus[..., 0] - minus[..., 1] - minus[..., 2]
        squares = apart * apart
        reach = 2 - squares[..., 0] - squares[..., 1] - squares[..., 2]
        reach[corner[..., 0] == _NONE] = 0
        lattice = (cell[:, None].astype(np.int64) + corner) & 0xFF
        codes = lattice[..., 0] << 16 | lattice[..., 1] << 8 | lattice[..., 2]
        self._codes, vertex = np.unique(codes, return_inverse=True)
        vertex = vertex.reshape(codes.shape)
        # Vertices out of reach add nothing: the others move up, in their order.
        order = np.argsort(reach <= 0, axis=1, kind="stable")
        near = np.take_along_axis(reach, order, 1)
        self._slots = [
            _slot(order[:, k], near[:, k], vertex, apart) for k in range((near > 0).sum(1).max())
        ]

    def at(self, seed: int) -> Floats:
        """The noise of `seed` (a whole number) at every place [N]."""
        table = permutation(seed)
        x, y, z = self._codes >> 16, self._codes >> 8 & 0xFF, self._codes & 0xFF
        gradient = GRADIENTS[table[(table[(table[x] + y) & 0xFF] + z) & 0xFF] % 24].T
        gx, gy, gz = (np.ascontiguousarray(axis) for axis in gradient)
        value = np.zeros(self.size)
        for slot in self._slots:
            dx, dy, dz = slot.apart
            towards = gx[slot.vertex] * dx + gy[slot.vertex] * dy + gz[slot.vertex] * dz
            towards *= slot.weight
            value[slot.place] += towards
        return value / NORM


def permutation(seed: int) -> Ints:
    """The 256 numbers that a seed shuffles, by a 64-bit linear congruential generator."""
    state = seed & WORD
    for _ in range(3):
        state = _next_seed(state)
    source = list(range(256))
    table = [0] * 256
    for i in range(255, -1, -1):
        state = _next_seed(state)
        pick = ((state if state < HALF else state - WORD - 1) + 31) % (i + 1)
        table[i] = source[pick]
        source[pick] = source[i]
    return np.array(table, np.int64)


def _next_seed(state: int) -> int:
    return (state * 6364136223846793005 + 1442695040888963407) & WORD


def _slot(choice: Ints, reach: Floats, vertex: Ints, apart: Floats) -> _Slot:
    place = np.flatnonzero(reach > 0)
    choice = choice[place]
    reach = reach[place]
    twice = reach * reach
    dx, dy, dz = (np.ascontiguousarray(axis) for axis in apart[place, choice].T)
    return _Slot(place, vertex[place, choice], (dx, dy, dz), twice * twice)


_NONE = 99  # a slot without a vertex


def _vertices(inside: Floats) -> tuple[Ints, Floats]:
    """The vertices of every place, from where it is in its cell [N, 3].

    Returns their cell corners [N, 8, 3] (_NONE where there are fewer), and what is subtracted from
    the place's offset to give its distance from them, in three steps [N, 8, 3 axes, 3 steps].
    """
    total = inside[:, 0] + inside[:, 1] + inside[:, 2]
    lower, upper = total <= 1, total >= 2
    corner = np.full((len(inside), SLOTS, 3), _NONE, np.int64)
    late = np.zeros(corner.shape, np.int64)  # the part of a corner that is subtracted last
    kinds = (
        (lower, LOWER, _lower),
        (upper & ~lower, UPPER, _upper),
        (~lower & ~upper, MIDDLE, _middle),
    )
    for rows, always, extra in kinds:
        count = len(always)
        corner[rows, :count] = always
        corner[rows, count : count + 2], late[rows, count : count + 2] = extra(inside[rows])
    squish = np.broadcast_to(corner.sum(2, keepdims=True) * SQUISH, corner.shape)
    minus = np.stack([corner - late, squish, late], 3)
    return corner, minus.astype(np.float64)


def _axis(number: Ints) -> Ints:
    """Unit vectors [n, 3] along axes [n]."""
    return np.eye(3, dtype=np.int64)[number]


def _two_nearest(inside: Floats, sign: int) -> tuple[Ints, Ints, Floats, Floats]:
    """The two axes with the highest (sign 1) or lowest (-1) part, as the algorithm breaks ties."""
    x, y, z = (sign * inside).T
    second = (x >= y) & (z > y)
    first = (x < y) & (z > x)
    a, b = np.where(first, 2, 0), np.where(second, 2, 1)
    return a, b, np.where(first, z, x), np.where(second, z, y)


def _lower(inside: Floats) -> tuple[Ints, Ints]:
    a, b, a_score, b_score = _two_nearest(inside, 1)
    rest = 1 - (inside[:, 0] + inside[:, 1] + inside[:, 2])
    near = ((rest > a_score) | (rest > b_score))[:, None]
    one = np.where(b_score > a_score, b, a)
    first, last = np.where(one == 0, 1, 0), np.where(one == 2, 1, 2)
    both = _axis(a) + _axis(b)
    missing = _axis(3 - a - b)
    return (
        np.stack(
            [
                np.where(near, _axis(one) - _axis(first), both),
                np.where(near, _axis(one) - _axis(last), both - missing),
            ],
            1,
        ),
        np.zeros((len(inside), 2, 3), np.int64),
    )


def _upper(inside: Floats) -> tuple[Ints, Ints]:
    # Here a and b are the axes that two of the vertices (1,1,0), (1,0,1), (0,1,1) lack.
    x, y, z = inside.T
    swap_b = (x <= y) & (z < y)
    swap_a = (x > y) & (z < x)
    a_point = np.where(swap_a, 0b011, 0b110)
    b_point = np.where(swap_b, 0b011, 0b101)
    a_score = np.where(swap_a, z, x)
    b_score = np.where(swap_b, z, y)
    rest = 3 - (x + y + z)
    far = ((rest < a_score) | (rest < b_score))[:, None]
    pair = _bits(np.where(b_score < a_score, b_point, a_point))
    lower = np.argmax(pair, 1)  # the first of the two axes
    higher = 2 - np.argmax(pair[:, ::-1], 1)
    shared = _bits(a_point & b_point)
    corner = np.stack(
        [
            np.where(far, pair + _axis(lower), shared),
            np.where(far, pair + _axis(higher), 2 * shared),
        ],
        1,
    )
    late = np.zeros_like(corner)
    # Along y, and only there, the second unit is subtracted after the squish.
    late[..., 1] = (far & (corner[..., 1] == 2)).astype(np.int64)
    return corner, late


def _bits(code: NDArray[Any]) -> Ints:
    """Codes [n] (1: x, 2: y, 4: z) as vectors of 0 and 1 [n, 3]."""
    return code[:, None] >> np.arange(3) & 1


def _middle(inside: Floats) -> tuple[Ints, Ints]:
    x, y, z = inside.T
    sums = (x + y, x + z, y + z)
    beyond = [s > 1 for s in sums]
    score = [np.where(far, s - 1, 1 - s) for far, s in zip(beyond, sums, strict=True)]
    far_point = (0b011, 0b101, 0b110)
    near_point = (0b100, 0b010, 0b001)
    point = [np.where(far, f, n) for far, f, n in zip(beyond, far_point, near_point, strict=True)]
    change_a = (score[0] <= score[1]) & (score[0] < score[2])
    change_b = (score[0] > score[1]) & (score[1] < score[2])
    a = np.where(change_a, point[2], point[0])
    a_far = np.where(change_a, beyond[2], beyond[0])
    b = np.where(change_b, point[2], point[1])
    b_far = np.where(change_b, beyond[2], beyond[1])
    both_far = (a_far & b_far)[:, None]
    both_near = (~a_far & ~b_far)[:, None]
    further = _bits(np.where(a_far, a, b))
    nearer = _bits(np.where(a_far, b, a))
    either = _bits(a | b)
    first = np.where(both_far, 1, np.where(both_near, 0, 2 * further - 1))
    second = np.where(both_far, 2 * _bits(a & b), np.where(both_near, 2 * either - 1, 2 * nearer))
    corner = np.stack([first, second], 1)
    late = np.zeros_like(corner)
    late[:, 1] = np.where(both_far | both_near, 0, 2 * nearer)
    return corner, late


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
                material[cell] = rules.TREE
        elif coal[cell] and draw() > 0.85:
            material[cell] = rules.COAL
        elif iron[cell] and draw() > 0.75:
            material[cell] = rules.IRON
        elif diamond[cell] and draw() > 0.994:
            material[cell] = rules.DIAMOND
    creatures = _settle(material, terrain.tunnel, draw)
    cells = np.zeros((rules.STRIDE, rules.STRIDE), np.uint8)
    inner = np.frombuffer(material, np.uint8).reshape(rules.SIDE, rules.SIDE)
    cells[rules.RIM : -rules.RIM, rules.RIM : -rules.RIM] = inner
    return Map(bytearray(cells.tobytes()), creatures, random)


def continued(generator: np.random.RandomState) -> Random:
    """Python's Mersenne twister where numpy's is: the same numbers, drawn ten times as fast."""
    state = generator.get_state(legacy=True)
    assert isinstance(state, tuple)
    random = Random()
    random.setstate((3, (*state[1].tolist(), int(state[2])), None))
    return random


def _settle(material: bytearray, tunnel: Flags, draw: Callable[[], float]) -> list[tuple[str, int]]:
    now = np.frombuffer(material, np.uint8)
    grass = now == rules.GRASS
    path = now == rules.PATH
    distance = _grid().distance
    cow = grass & (distance > 3)
    zombie = (grass | path | (now == rules.SAND)) & (distance > 10)
    skeleton = path & tunnel
    cows = cow.tobytes()
    zombies = zombie.tobytes()
    skeletons = skeleton.tobytes()
    born: list[tuple[str, int]] = []
    place = _grid().place
    for cell in np.flatnonzero(cow | zombie | skeleton).tolist():
        if cows[cell] and draw() > 0.985:
            born.append(("cow", place[cell]))
        elif zombies[cell] and draw() > 0.993:
            born.append(("zombie", place[cell]))
        elif skeletons[cell] and draw() > 0.95:
            born.append(("skeleton", place[cell]))
    return born


@dataclass(frozen=True, slots=True)
class _Grid:
    """The parts that every map shares: distances from the player's start, places, the noise."""

    distance: Floats
    place: list[int]
    noise: Noise


@cache
def _grid() -> _Grid:
    x, y = (axis.ravel() for axis in np.indices((rules.SIDE, rules.SIDE)))
    middle = rules.SIDE // 2
    distance = np.sqrt((x - middle) ** 2 + (y - middle) ** 2)
    rim = np.arange(rules.CELLS).reshape(rules.STRIDE, rules.STRIDE)[
        rules.RIM : -rules.RIM, rules.RIM : -rules.RIM
    ]
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
    kinds = (
        (cave | tunnel, rules.PATH),
        (solid, rules.STONE),
        (lava, rules.LAVA),
        (sand, rules.SAND),
        (sea, rules.WATER),
    )
    material = np.full(len(start), rules.GRASS, np.uint8)
    for where, kind in kinds:
        material[where] = kind
    may_tree = plain & ~sand & ~sea & (field["tree"] > 0)
    return _Terrain(material, tunnel, may_coal, may_iron, may_diamond, may_tree)
