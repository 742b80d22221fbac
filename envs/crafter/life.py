"""Creatures and objects of Crafter: cows, zombies, skeletons, arrows and plants (Hafner, 2021).

Random numbers are drawn in the same order as in the `crafter` package, including its quirks: an
object that was removed in the current step is still updated once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from embodied.envs.crafter.rules import (
    FURNACE,
    LOOK,
    PATH,
    STRIDE,
    TABLE,
    WALKABLE,
    WALKABLE_ARROW,
    WAYS,
)

KINDS = ("player", "cow", "zombie", "skeleton", "arrow", "plant")
PLAYER, COW, ZOMBIE, SKELETON, ARROW, PLANT = range(6)
HEALTH = (0, 3, 5, 3, 0, 1)  # at birth; the player's is in the inventory
RIPE = 300  # steps after which a plant bears fruit
ARROW_LOOK = {
    way: LOOK[f"arrow-{name}"]
    for way, name in zip(WAYS, ("left", "right", "up", "down"), strict=True)
}
FIRST_LOOK = (0, LOOK["cow"], LOOK["zombie"], LOOK["skeleton"], 0, LOOK["plant"])


class Thing:
    """An object on a cell. `clock` is a zombie's cooldown, a skeleton's reload time or a plant's
    age; `way` is the direction of an arrow (the offset that is added to `at`).
    """

    __slots__ = ("at", "clock", "health", "kind", "removed", "way", "x", "y")

    health: int

    def __init__(self, kind: int, at: int, way: int = 0) -> None:
        self.kind = kind
        self.at = at
        self.way = way
        self.x, self.y = divmod(at, STRIDE)
        self.health = HEALTH[kind]
        self.clock = 0
        self.removed = False

    @property
    def look(self) -> int:
        """The number of its picture."""
        if self.kind == ARROW:
            return ARROW_LOOK[self.way]
        if self.kind == PLANT and self.clock > RIPE:
            return LOOK["plant-ripe"]
        return FIRST_LOOK[self.kind]


class Sleeper(Protocol):
    """The player as creatures access it."""

    x: int
    y: int
    sleeping: bool

    @property
    def health(self) -> int: ...

    @health.setter
    def health(self, value: int, /) -> None: ...


class Land(Protocol):
    """The game as creatures access it."""

    cells: bytearray
    who: list[Thing | None]
    look: bytearray
    random: Callable[[], float]
    bits: Callable[[int], int]

    @property
    def player(self) -> Sleeper: ...

    def add(self, thing: Thing) -> None: ...

    def remove(self, thing: Thing) -> None: ...

    def move(self, thing: Thing, way: int, ground: bytes) -> bool: ...

    def put(self, at: int, material: int) -> None: ...


def toward(dx: int, dy: int, long: bool) -> int:
    """The step along the longer (or shorter) axis of an offset; 0 where that axis is 0."""
    if (abs(dx) > abs(dy)) if long else (abs(dx) <= abs(dy)):
        return STRIDE if dx > 0 else -STRIDE if dx < 0 else 0
    return 1 if dy > 0 else -1 if dy < 0 else 0


def cow(world: Land, me: Thing) -> None:
    if me.health <= 0:
        world.remove(me)
    if world.random() < 0.5:
        world.move(me, WAYS[world.bits(32) & 3], WALKABLE)


def zombie(world: Land, me: Thing) -> None:
    if me.health <= 0:
        world.remove(me)
    player = world.player
    random = world.random
    dx, dy = player.x - me.x, player.y - me.y
    if abs(dx) + abs(dy) <= 8 and random() < 0.9:
        way = toward(dx, dy, random() < 0.8)
    else:
        way = WAYS[world.bits(32) & 3]
    world.move(me, way, WALKABLE)
    if abs(player.x - me.x) + abs(player.y - me.y) <= 1:
        if me.clock:
            me.clock -= 1
        else:
            player.health = max(0, player.health - (7 if player.sleeping else 2))
            me.clock = 5


def skeleton(world: Land, me: Thing) -> None:
    if me.health <= 0:
        world.remove(me)
    me.clock = max(0, me.clock - 1)
    random = world.random
    dx, dy = world.player.x - me.x, world.player.y - me.y
    distance = abs(dx) + abs(dy)
    if distance <= 3 and world.move(me, -toward(dx, dy, random() < 0.6), WALKABLE):
        return
    if distance <= 5 and random() < 0.5:
        way = toward(dx, dy, True)
        to = me.at + way
        free = world.who[to] is None and WALKABLE_ARROW[world.cells[to]]
        if me.clock == 0 and way != 0 and free:
            world.add(Thing(ARROW, to, way))
            me.clock = 4
    elif distance <= 8 and random() < 0.3:
        world.move(me, toward(dx, dy, random() < 0.6), WALKABLE)
    elif random() < 0.2:
        world.move(me, WAYS[world.bits(32) & 3], WALKABLE)


def arrow(world: Land, me: Thing) -> None:
    to = me.at + me.way
    hit = world.who[to]
    if hit is not None:
        hit.health = max(0, hit.health - 2)
        world.remove(me)
    elif not WALKABLE_ARROW[world.cells[to]]:
        world.remove(me)
        if world.cells[to] in (TABLE, FURNACE):
            world.put(to, PATH)
    else:
        world.move(me, me.way, WALKABLE_ARROW)


def plant(world: Land, me: Thing) -> None:
    me.clock += 1
    for way in WAYS:
        near = world.who[me.at + way]
        if near is not None and near.kind in (ZOMBIE, SKELETON, COW):
            me.health = max(0, me.health - 1)
            break
    if me.health <= 0:
        world.remove(me)
    elif me.clock == RIPE + 1:
        world.look[me.at] = me.look


TURNS: tuple[Callable[[Land, Thing], None], ...] = (
    lambda world, me: None,  # the player has moved already
    *(cow, zombie, skeleton, arrow, plant),
)
