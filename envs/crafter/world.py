"""Simulation of one Crafter game with the rules of the `crafter` package, without rendering.

Source: Crafter (Hafner, 2021). The same seed and actions give the same result as the package:
random numbers are drawn in the same order, including those for the noise of night images that are
not rendered. One difference: when a creature of a chunk despawns, the package chooses by memory
order; here creatures are ordered by when they entered the chunk.
"""

from __future__ import annotations

from functools import cache
from random import Random

import numpy as np

from embodied.envs.crafter.life import COW, KINDS, SKELETON, TURNS, ZOMBIE, Thing
from embodied.envs.crafter.maps import make
from embodied.envs.crafter.player import Player
from embodied.envs.crafter.rules import (
    CELLS,
    CHUNK_CELLS,
    CHUNK_OF,
    GRASS,
    HIGH,
    NEAR,
    PATH,
    SIDE,
    STRIDE,
    WIDE,
    place,
)

UNIT = 7  # pixels of a cell in the package's 64 x 64 picture
GRAIN = 2 * 32 * (WIDE * UNIT) * (HIGH * UNIT)  # random bits in one picture of the night
CHUNKS = np.array(CHUNK_OF)
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
        self.player = Player(place(SIDE // 2, SIDE // 2))
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
        self.who: list[Thing | None] = [None] * CELLS
        self.look = bytearray(CELLS)
        self.things: list[Thing] = []
        self.chunks: dict[int, dict[Thing, None]] = {}
        self.gone = False
        self.grass, self.path = self._count(GRASS), self._count(PATH)

    def _count(self, material: int) -> list[int]:
        """The number of cells of a material in each chunk."""
        chunks = CHUNKS[np.frombuffer(self.cells, np.uint8) == material]
        return np.bincount(chunks, minlength=len(CHUNK_CELLS)).tolist()

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
            if abs(thing.x - x) + abs(thing.y - y) < NEAR:
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
                    self._adjust(chunk, ZOMBIE, GRASS, 6, 0, 0.3, 0.4, low)
                low = 0 if path < 6 else 1
                if not low <= kinds.count(SKELETON) <= 2:
                    self._adjust(chunk, SKELETON, PATH, 7, 7, 0.1, 0.1, low)
                low = 0 if grass < 30 else 1
                if not low <= kinds.count(COW) <= cows:
                    self._adjust(chunk, COW, GRASS, 5, 5, 0.01, 0.1, low)
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
        self.chunks.setdefault(CHUNK_OF[thing.at], {})[thing] = None

    def remove(self, thing: Thing) -> None:
        """Remove an object; no effect if it was removed before."""
        if thing.removed:
            return
        self.who[thing.at] = None
        self.look[thing.at] = 0
        del self.chunks[CHUNK_OF[thing.at]][thing]
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
        if CHUNK_OF[at] != CHUNK_OF[to]:
            del self.chunks[CHUNK_OF[at]][thing]
            self.chunks.setdefault(CHUNK_OF[to], {})[thing] = None
        thing.at = to
        thing.x, thing.y = divmod(to, STRIDE)
        return True

    def put(self, at: int, material: int) -> None:
        """Change the ground of a cell."""
        chunk = CHUNK_OF[at]
        before = self.cells[at]
        for kind, counts in ((GRASS, self.grass), (PATH, self.path)):
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
                ground = [at for at in CHUNK_CELLS[chunk] if self.cells[at] == material]
                at = ground[self._below(len(ground))]
                if self.who[at] is None and self._far(at) >= spawn_far:
                    self.add(Thing(kind, at))
        elif self.random() < despawn:
            thing = creatures[self._below(len(creatures))]
            if self._far(thing.at) >= despawn_far:
                self.remove(thing)

    def _far(self, at: int) -> int:
        x, y = divmod(at, STRIDE)
        return abs(x - self.player.x) + abs(y - self.player.y)

    def _below(self, count: int) -> int:
        """A whole number from 0 to count - 1, drawn as numpy's RandomState.randint does."""
        if count == 1:
            return 0
        mask = (1 << (count - 1).bit_length()) - 1
        while (number := self.bits(32) & mask) >= count:
            pass
        return number
