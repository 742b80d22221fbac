"""Simulation of one Crafter game, without rendering: player, creatures, objects (Hafner, 2021).

Random numbers are drawn in the same order as in the `crafter` package, including its quirks: an
object that was removed in the current step is still updated once.
The same seed and actions give the same result as the package, including the random numbers for the
noise of night images that are not rendered. One difference: when a creature of a chunk despawns,
the package chooses by memory order; here creatures are ordered by when they entered the chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random

import numpy as np

from embodied.envs.crafter import rules
from embodied.envs.crafter.maps import make

KINDS = rules.CREATURES
PLAYER, COW, ZOMBIE, SKELETON, ARROW, PLANT = range(6)
BIRTH_HEALTH = (0, 3, 5, 3, 0, 1)  # at birth; the player's is in the inventory
RIPE = 300  # steps after which a plant bears fruit
ARROW_LOOK = {way: rules.LOOK[f"arrow-{name}"] for way, name in rules.WAY_NAMES.items()}
FIRST_LOOK = tuple(rules.LOOK.get(kind, 0) for kind in KINDS)


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
        self.x, self.y = divmod(at, rules.STRIDE)
        self.health = BIRTH_HEALTH[kind]
        self.clock = 0
        self.removed = False

    @property
    def look(self) -> int:
        """The number of its picture."""
        if self.kind == ARROW:
            return ARROW_LOOK[self.way]
        if self.kind == PLANT and self.clock > RIPE:
            return rules.LOOK["plant-ripe"]
        return FIRST_LOOK[self.kind]


def toward(dx: int, dy: int, long: bool) -> int:
    """The step along the longer (or shorter) axis of an offset; 0 where that axis is 0."""
    if (abs(dx) > abs(dy)) if long else (abs(dx) <= abs(dy)):
        return rules.STRIDE if dx > 0 else -rules.STRIDE if dx < 0 else 0
    return 1 if dy > 0 else -1 if dy < 0 else 0


def cow(world: World, me: Thing) -> None:
    if me.health <= 0:
        world.remove(me)
    if world.random() < 0.5:
        world.move(me, rules.WAYS[world.bits(32) & 3], rules.WALKABLE)


def zombie(world: World, me: Thing) -> None:
    if me.health <= 0:
        world.remove(me)
    player = world.player
    random = world.random
    dx, dy = player.x - me.x, player.y - me.y
    if abs(dx) + abs(dy) <= 8 and random() < 0.9:
        way = toward(dx, dy, random() < 0.8)
    else:
        way = rules.WAYS[world.bits(32) & 3]
    world.move(me, way, rules.WALKABLE)
    if abs(player.x - me.x) + abs(player.y - me.y) <= 1:
        if me.clock:
            me.clock -= 1
        else:
            player.health = max(0, player.health - (7 if player.sleeping else 2))
            me.clock = 5


def skeleton(world: World, me: Thing) -> None:
    if me.health <= 0:
        world.remove(me)
    me.clock = max(0, me.clock - 1)
    random = world.random
    dx, dy = world.player.x - me.x, world.player.y - me.y
    distance = abs(dx) + abs(dy)
    if distance <= 3 and world.move(me, -toward(dx, dy, random() < 0.6), rules.WALKABLE):
        return
    if distance <= 5 and random() < 0.5:
        way = toward(dx, dy, True)
        to = me.at + way
        free = world.who[to] is None and rules.WALKABLE_ARROW[world.cells[to]]
        if me.clock == 0 and way != 0 and free:
            world.add(Thing(ARROW, to, way))
            me.clock = 4
    elif distance <= 8 and random() < 0.3:
        world.move(me, toward(dx, dy, random() < 0.6), rules.WALKABLE)
    elif random() < 0.2:
        world.move(me, rules.WAYS[world.bits(32) & 3], rules.WALKABLE)


def arrow(world: World, me: Thing) -> None:
    to = me.at + me.way
    hit = world.who[to]
    if hit is not None:
        hit.health = max(0, hit.health - 2)
        world.remove(me)
    elif not rules.WALKABLE_ARROW[world.cells[to]]:
        world.remove(me)
        if world.cells[to] in (rules.TABLE, rules.FURNACE):
            world.put(to, rules.PATH)
    else:
        world.move(me, me.way, rules.WALKABLE_ARROW)


def plant(world: World, me: Thing) -> None:
    me.clock += 1
    for way in rules.WAYS:
        near = world.who[me.at + way]
        if near is not None and near.kind in (ZOMBIE, SKELETON, COW):
            me.health = max(0, me.health - 1)
            break
    if me.health <= 0:
        world.remove(me)
    elif me.clock == RIPE + 1:
        world.look[me.at] = me.look


TURNS: tuple[Callable[[World, Thing], None], ...] = (
    lambda world, me: None,  # the player has moved already
    *(cow, zombie, skeleton, arrow, plant),
)


HEALTH, FOOD, DRINK, ENERGY = (
    rules.ITEMS.index(name) for name in ("health", "food", "drink", "energy")
)
SWORDS = tuple(
    (rules.ITEMS.index(name), damage)
    for name, damage in (("iron_sword", 5), ("stone_sword", 3), ("wood_sword", 2))
)
DO = rules.ACTIONS.index("do")
SLEEP = rules.ACTIONS.index("sleep")
MOVES = {rules.ACTIONS.index(f"move_{name}"): way for way, name in rules.WAY_NAMES.items()}
WAKE_UP, EAT_PLANT, EAT_COW, DEFEAT_ZOMBIE, DEFEAT_SKELETON = (
    rules.ACHIEVEMENTS.index(name)
    for name in ("wake_up", "eat_plant", "eat_cow", "defeat_zombie", "defeat_skeleton")
)
PLAYER_LOOK = {way: rules.LOOK[f"player-{name}"] for way, name in rules.WAY_NAMES.items()}
NEIGHBOURHOOD = tuple(dx + dy for dx in (-rules.STRIDE, 0, rules.STRIDE) for dy in (-1, 0, 1))


class Player(Thing):
    """`way` is where it looks; `achieved` counts every achievement, `hunger`, `thirst`, `fatigue`
    and `recover` run up to a change of a vital, `before` is the health a step ago."""

    __slots__ = (
        *("achieved", "before", "fatigue", "hunger", "inventory", "recover"),
        *("sleeping", "thirst"),
    )

    def __init__(self, at: int) -> None:
        self.inventory = list(rules.INITIAL)
        super().__init__(PLAYER, at, rules.DOWN)
        self.health = rules.INITIAL[HEALTH]
        self.achieved = [0] * len(rules.ACHIEVEMENTS)
        self.sleeping = False
        self.hunger = self.thirst = self.fatigue = self.recover = 0.0
        self.before = self.health

    @property
    def health(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inventory[HEALTH]

    @health.setter
    def health(self, value: int) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.inventory[HEALTH] = value

    @property
    def look(self) -> int:
        return rules.LOOK["player-sleep"] if self.sleeping else PLAYER_LOOK[self.way]

    def turn(self, world: World, action: int) -> None:
        if self.sleeping:
            if self.inventory[ENERGY] < rules.MOST[ENERGY]:
                action = SLEEP
            else:
                self.sleeping = False
                self.achieved[WAKE_UP] += 1
        target = self.at + self.way
        if action in MOVES:
            self.way = MOVES[action]
            world.move(self, self.way, rules.WALKABLE_PLAYER)
            if world.cells[self.at] == rules.LAVA:
                self.health = 0
        elif action == DO:
            thing = world.who[target]
            if thing is None:
                self._collect(world, target)
            elif thing.kind == PLANT:
                if thing.clock > RIPE:
                    thing.clock = 0
                    world.look[thing.at] = thing.look
                    self.inventory[FOOD] += 4
                    self.achieved[EAT_PLANT] += 1
            elif thing.kind in (ZOMBIE, SKELETON, COW):
                damage = next((damage for item, damage in SWORDS if self.inventory[item]), 1)
                thing.health = max(0, thing.health - damage)
                if thing.health <= 0:
                    self._defeat(thing.kind)
        elif action == SLEEP:
            if self.inventory[ENERGY] < rules.MOST[ENERGY]:
                self.sleeping = True
        elif action in rules.PLACE:
            self._place(world, target, rules.PLACE[action])
        elif action in rules.MAKE:
            self._make(world, rules.MAKE[action])
        self._advance_life()
        self.inventory[:] = [
            0 if count < 0 else most if count > most else count
            for count, most in zip(self.inventory, rules.MOST, strict=True)
        ]
        if self.health < self.before:
            self.sleeping = False
        self.before = self.health

    def _defeat(self, kind: int) -> None:
        if kind == COW:
            self.inventory[FOOD] += 6
            self.achieved[EAT_COW] += 1
            self.hunger = 0
        else:
            self.achieved[DEFEAT_ZOMBIE if kind == ZOMBIE else DEFEAT_SKELETON] += 1

    def _collect(self, world: World, target: int) -> None:
        material = world.cells[target]
        if material == rules.WATER:
            self.thirst = 0
        rule = rules.COLLECT.get(material)
        if rule is None or not self._can_pay(rule.needs):
            return
        world.put(target, rule.leaves)
        if world.random() <= rule.chance:
            for item, count in rule.gives:
                self.inventory[item] += count
            for achievement in rule.achieved:
                self.achieved[achievement] += 1

    def _place(self, world: World, target: int, rule: rules.Place) -> None:
        free = world.who[target] is None and rule.where[world.cells[target]]
        if not free or not self._can_pay(rule.costs):
            return
        self._pay(rule.costs)
        if rule.material:
            world.put(target, rule.material)
        else:
            world.add(Thing(PLANT, target))
        self.achieved[rule.achieved] += 1

    def _make(self, world: World, rule: rules.Make) -> None:
        near: set[int] = set()
        # At the left and upper edge of the map the package finds nothing near.
        if self.x > rules.RIM and self.y > rules.RIM:
            near = {world.cells[self.at + step] for step in NEIGHBOURHOOD}
        if not near.issuperset(rule.near) or not self._can_pay(rule.costs):
            return
        self._pay(rule.costs)
        self.inventory[rule.item] += rule.gives
        self.achieved[rule.achieved] += 1

    def _can_pay(self, amounts: rules.Amounts) -> bool:
        return all(self.inventory[item] >= count for item, count in amounts)

    def _pay(self, amounts: rules.Amounts) -> None:
        for item, count in amounts:
            self.inventory[item] -= count

    def _advance_life(self) -> None:
        inventory = self.inventory
        sleeping = self.sleeping
        self.hunger += 0.5 if sleeping else 1
        if self.hunger > 25:
            self.hunger = 0
            inventory[FOOD] -= 1
        self.thirst += 0.5 if sleeping else 1
        if self.thirst > 20:
            self.thirst = 0
            inventory[DRINK] -= 1
        self.fatigue = min(self.fatigue - 1, 0) if sleeping else self.fatigue + 1
        if self.fatigue < -10:
            self.fatigue = 0
            inventory[ENERGY] += 1
        if self.fatigue > 30:
            self.fatigue = 0
            inventory[ENERGY] -= 1
        well = inventory[FOOD] > 0 and inventory[DRINK] > 0 and (inventory[ENERGY] > 0 or sleeping)
        if well:
            self.recover += 2 if sleeping else 1
        else:
            self.recover -= 0.5 if sleeping else 1
        if self.recover > 25:
            self.recover = 0
            self.health += 1
        if self.recover < -15:
            self.recover = 0
            self.health = max(0, self.health - 1)


UNIT = 7  # pixels of a cell in the package's 64 x 64 picture
GRAIN = 2 * 32 * (rules.WIDE * UNIT) * (rules.HIGH * UNIT)  # random bits in a picture at night
CHUNKS = np.array(rules.CHUNK_OF)
KIND = {name: number for number, name in enumerate(KINDS)}


@cache
def daylight(step: int) -> float:
    """The daylight, from 0 (dark) to 1; a day has 300 steps."""
    progress = (step / 300) % 1 + 0.3
    return float(1 - np.abs(np.cos(np.pi * progress)) ** 3)


class World:
    """A running episode. Per cell: `cells` its material, `look` the sprite on it, `who` the object
    on it. `seed` and `episode` determine everything but the actions.
    """

    def __init__(self, seed: int, length: int | None = 10000) -> None:
        self.seed = seed
        self.length = length
        self.episode = 0
        self.begin()

    def begin(self) -> None:
        """Start the next episode of this seed."""
        self.episode += 1
        drawn = make(hash((self.seed, self.episode)) % (2**31 - 1))
        self.set_random(drawn.random.getstate())
        self.cells = drawn.cells
        self.clock = 0
        self.light = daylight(0)
        self.began = 0  # the clock at the start; a saved state may be taken over later in the day
        self.empty()
        self.player = Player(rules.place(rules.SIDE // 2, rules.SIDE // 2))
        self.add(self.player)
        for kind, at in drawn.creatures:
            self.add(Thing(KIND[kind], at))
        self.before = self.player.health
        self.unlocked = [False] * len(self.player.achieved)
        self._shimmer()

    def set_random(self, state: tuple) -> None:
        """Draw from a Mersenne twister in this state from now on."""
        self.generator = Random()
        self.generator.setstate(state)
        self.random = self.generator.random
        self.bits = self.generator.getrandbits

    def empty(self) -> None:
        """Remove all objects; count the materials of each chunk."""
        self.who: list[Thing | None] = [None] * rules.CELLS
        self.look = bytearray(rules.CELLS)
        self.things: list[Thing] = []
        self.chunks: dict[int, dict[Thing, None]] = {}
        self.gone = False
        self.grass, self.path = self._count(rules.GRASS), self._count(rules.PATH)

    def _count(self, material: int) -> list[int]:
        chunks = CHUNKS[np.frombuffer(self.cells, np.uint8) == material]
        return np.bincount(chunks, minlength=len(rules.CHUNK_CELLS)).tolist()

    def step(self, action: int) -> tuple[float, bool, bool]:
        """One step; returns the reward, whether the player died, and whether the time limit was
        reached.
        """
        self.clock += 1
        self.light = daylight(self.clock)
        player = self.player
        others = self.things[1:]  # who comes in this step waits
        player.turn(self, action)
        self.look[player.at] = player.look
        x, y = player.x, player.y
        for thing in others:
            if abs(thing.x - x) + abs(thing.y - y) < rules.NEAR:
                TURNS[thing.kind](self, thing)
        if self.clock % 10 == 0:
            # Creatures come and go, chunk by chunk.
            light = self.light
            night = int(3.5 - 3 * light)
            cows = int(1.5 + light)
            for chunk, things in list(self.chunks.items()):
                kinds = [thing.kind for thing in things]
                grass = self.grass[chunk]
                path = self.path[chunk]
                low = 0 if grass < 50 else night
                if not low <= kinds.count(ZOMBIE) <= night:
                    self._adjust(chunk, ZOMBIE, rules.GRASS, 6, 0, 0.3, 0.4, low)
                low = 0 if path < 6 else 1
                if not low <= kinds.count(SKELETON) <= 2:
                    self._adjust(chunk, SKELETON, rules.PATH, 7, 7, 0.1, 0.1, low)
                low = 0 if grass < 30 else 1
                if not low <= kinds.count(COW) <= cows:
                    self._adjust(chunk, COW, rules.GRASS, 5, 5, 0.01, 0.1, low)
        if self.gone:
            self.things = [thing for thing in self.things if not thing.removed]
            self.gone = False
        self._shimmer()
        reward = (player.health - self.before) / 10
        self.before = player.health
        unlocked = [count > 0 for count in player.achieved]
        if unlocked != self.unlocked:
            self.unlocked = unlocked
            reward += 1.0
        dead = player.health <= 0
        late = self.length is not None and self.clock - self.began >= self.length
        return reward, dead, late

    def _shimmer(self) -> None:
        """Night images have noise; draw its random numbers even if no image is rendered."""
        self.grain = self.bits(GRAIN) if self.light < 0.5 else 0

    def add(self, thing: Thing) -> None:
        """Put an object on an empty cell."""
        self.things.append(thing)
        self.who[thing.at] = thing
        self.look[thing.at] = thing.look
        self.chunks.setdefault(rules.CHUNK_OF[thing.at], {})[thing] = None

    def remove(self, thing: Thing) -> None:
        """Remove an object; no effect if it was removed before."""
        if thing.removed:
            return
        self.who[thing.at] = None
        self.look[thing.at] = 0
        del self.chunks[rules.CHUNK_OF[thing.at]][thing]
        thing.removed = self.gone = True

    def move(self, thing: Thing, way: int, ground: bytes) -> bool:
        """Move an object by one step if the target cell is free and of an allowed material; returns
        success.
        """
        at = thing.at
        to = at + way
        if self.who[to] is not None or not ground[self.cells[to]]:
            return False
        if thing.removed:
            return True
        self.who[at] = None
        self.who[to] = thing
        self.look[to] = self.look[at]
        self.look[at] = 0
        if rules.CHUNK_OF[at] != rules.CHUNK_OF[to]:
            del self.chunks[rules.CHUNK_OF[at]][thing]
            self.chunks.setdefault(rules.CHUNK_OF[to], {})[thing] = None
        thing.at = to
        thing.x, thing.y = divmod(to, rules.STRIDE)
        return True

    def put(self, at: int, material: int) -> None:
        chunk = rules.CHUNK_OF[at]
        before = self.cells[at]
        for kind, counts in ((rules.GRASS, self.grass), (rules.PATH, self.path)):
            counts[chunk] += (material == kind) - (before == kind)
        self.cells[at] = material

    def _adjust(
        self,
        chunk: int,
        kind: int,
        material: int,
        spawn_far: int,
        despawn_far: int,
        spawn: float,
        despawn: float,
        least: int,
    ) -> None:
        """One more of `kind` in a chunk that has fewer than `least`, else one less; perhaps."""
        creatures = [thing for thing in self.chunks[chunk] if thing.kind == kind]
        if len(creatures) < least:
            if self.random() < spawn:
                ground = [at for at in rules.CHUNK_CELLS[chunk] if self.cells[at] == material]
                at = ground[self._below(len(ground))]
                if self.who[at] is None and self._far(at) >= spawn_far:
                    self.add(Thing(kind, at))
        elif self.random() < despawn:
            thing = creatures[self._below(len(creatures))]
            if self._far(thing.at) >= despawn_far:
                self.remove(thing)

    def _far(self, at: int) -> int:
        x, y = divmod(at, rules.STRIDE)
        return abs(x - self.player.x) + abs(y - self.player.y)

    def _below(self, count: int) -> int:
        """A whole number from 0 to count - 1, drawn as numpy's RandomState.randint does."""
        if count == 1:
            return 0
        mask = (1 << (count - 1).bit_length()) - 1
        while (number := self.bits(32) & mask) >= count:
            pass
        return number
