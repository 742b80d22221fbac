"""The player of Crafter: move, collect, place, make, attack, eat, drink and sleep (Hafner, "
"2021)."""

from __future__ import annotations

from embodied.envs.crafter.life import COW, PLANT, PLAYER, RIPE, SKELETON, ZOMBIE, Land, Thing
from embodied.envs.crafter.rules import (
    ACHIEVEMENTS,
    ACTIONS,
    COLLECT,
    DOWN,
    INITIAL,
    ITEMS,
    LAVA,
    LOOK,
    MAKE,
    MOST,
    PLACE,
    RIM,
    STRIDE,
    WALKABLE_PLAYER,
    WATER,
    WAYS,
    Amounts,
    Make,
    Place,
)

HEALTH, FOOD, DRINK, ENERGY = (ITEMS.index(name) for name in ("health", "food", "drink", "energy"))
SWORDS = tuple(
    (ITEMS.index(name), damage)
    for name, damage in (("iron_sword", 5), ("stone_sword", 3), ("wood_sword", 2))
)
DO = ACTIONS.index("do")
SLEEP = ACTIONS.index("sleep")
MOVES = {
    ACTIONS.index(f"move_{name}"): way
    for name, way in zip(("left", "right", "up", "down"), WAYS, strict=True)
}
WAKE_UP, EAT_PLANT, EAT_COW, DEFEAT_ZOMBIE, DEFEAT_SKELETON = (
    ACHIEVEMENTS.index(name)
    for name in ("wake_up", "eat_plant", "eat_cow", "defeat_zombie", "defeat_skeleton")
)
PLAYER_LOOK = {
    way: LOOK[f"player-{name}"]
    for way, name in zip(WAYS, ("left", "right", "up", "down"), strict=True)
}
NEIGHBOURHOOD = tuple(dx + dy for dx in (-STRIDE, 0, STRIDE) for dy in (-1, 0, 1))


class Player(Thing):
    """`way` is where it looks; `achieved` counts every achievement, `hunger`, `thirst`, `fatigue`
    and `recover` run up to a change of a vital, `before` is the health a step ago."""

    __slots__ = (
        *("achieved", "before", "fatigue", "hunger", "inventory", "recover"),
        *("sleeping", "thirst"),
    )

    def __init__(self, at: int) -> None:
        self.inventory = list(INITIAL)
        super().__init__(PLAYER, at, DOWN)
        self.health = INITIAL[HEALTH]
        self.achieved = [0] * len(ACHIEVEMENTS)
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
        return LOOK["player-sleep"] if self.sleeping else PLAYER_LOOK[self.way]

    def turn(self, world: Land, action: int) -> None:
        """One step of the player."""
        if self.sleeping:
            if self.inventory[ENERGY] < MOST[ENERGY]:
                action = SLEEP
            else:
                self.sleeping = False
                self.achieved[WAKE_UP] += 1
        target = self.at + self.way
        if action in MOVES:
            self.way = MOVES[action]
            world.move(self, self.way, WALKABLE_PLAYER)
            if world.cells[self.at] == LAVA:
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
            if self.inventory[ENERGY] < MOST[ENERGY]:
                self.sleeping = True
        elif action in PLACE:
            self._place(world, target, PLACE[action])
        elif action in MAKE:
            self._make(world, MAKE[action])
        self._advance_life()
        self.inventory[:] = [
            0 if count < 0 else most if count > most else count
            for count, most in zip(self.inventory, MOST, strict=True)
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

    def _collect(self, world: Land, target: int) -> None:
        material = world.cells[target]
        if material == WATER:
            self.thirst = 0
        rule = COLLECT.get(material)
        if rule is None or not self._can_pay(rule.needs):
            return
        world.put(target, rule.leaves)
        if world.random() <= rule.chance:
            for item, count in rule.gives:
                self.inventory[item] += count
            for achievement in rule.achieved:
                self.achieved[achievement] += 1

    def _place(self, world: Land, target: int, rule: Place) -> None:
        free = world.who[target] is None and rule.where[world.cells[target]]
        if not free or not self._can_pay(rule.costs):
            return
        self._pay(rule.costs)
        if rule.material:
            world.put(target, rule.material)
        else:
            world.add(Thing(PLANT, target))
        self.achieved[rule.achieved] += 1

    def _make(self, world: Land, rule: Make) -> None:
        near: set[int] = set()
        # At the left and upper edge of the map the package finds nothing near.
        if self.x > RIM and self.y > RIM:
            near = {world.cells[self.at + step] for step in NEIGHBOURHOOD}
        if not near.issuperset(rule.near) or not self._can_pay(rule.costs):
            return
        self._pay(rule.costs)
        self.inventory[rule.item] += rule.gives
        self.achieved[rule.achieved] += 1

    def _can_pay(self, amounts: Amounts) -> bool:
        return all(self.inventory[item] >= count for item, count in amounts)

    def _pay(self, amounts: Amounts) -> None:
        for item, count in amounts:
            self.inventory[item] -= count

    def _advance_life(self) -> None:
        """Hunger, thirst, fatigue; health comes back or goes."""
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
