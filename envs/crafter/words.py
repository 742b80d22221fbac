"""Text description of a Crafter game: objects in view, vitals, inventory, achievements."""

from __future__ import annotations

import numpy as np

from embodied.envs.crafter.player import DRINK, ENERGY, FOOD, HEALTH
from embodied.envs.crafter.rules import ACHIEVEMENTS, HIGH, ITEMS, SYMBOL, SYMBOLS, WAYS, WIDE
from embodied.envs.crafter.view import seen
from embodied.envs.crafter.world import World

VITAL = (HEALTH, FOOD, DRINK, ENERGY)
FACING: dict[int, str] = dict(zip(WAYS, ("left", "right", "up", "down"), strict=True))
# The cell in front, from the middle of the view: (down, right).
AHEAD: dict[int, tuple[int, int]] = dict(zip(WAYS, ((0, -1), (0, 1), (-1, 0), (1, 0)), strict=True))


def words(world: World) -> str:
    """Near things with direction and distance, vitals, inventory, daylight, achievements."""
    player = world.player
    view = seen(world)
    down, right = AHEAD[player.way]
    ahead = SYMBOLS[view[HIGH // 2 + down, WIDE // 2 + right]]
    vitals = ", ".join(f"{ITEMS[i]} {player.inventory[i]}/9" for i in VITAL)
    has = [f"{n} {ITEMS[i]}" for i, n in enumerate(player.inventory) if n and i not in VITAL]
    done = [name for name, count in zip(ACHIEVEMENTS, player.achieved, strict=True) if count]
    state = "asleep" if player.sleeping else "awake"
    return "\n".join(
        [
            f"The player is {state}, faces {FACING[player.way]}, in front of it: {ahead}.",
            f"It sees {_near(view)}.",
            f"Vitals: {vitals}. It has {_listed(has)}.",
            f"Daylight {world.light:.0%}, step {world.clock}. Achieved: {_listed(done)}.",
        ]
    )


def _near(view: np.ndarray) -> str:
    """The nearest of every kind, the nearest kind first, and how many there are in view."""
    down = np.arange(HIGH)[:, None] - HIGH // 2 + np.zeros_like(view, np.int64)
    right = np.arange(WIDE) - WIDE // 2 + np.zeros_like(view, np.int64)
    distance = np.abs(down) + np.abs(right)
    found: list[tuple[int, str]] = []
    for kind in np.unique(view).tolist():
        if kind in (SYMBOL["player"], SYMBOL["nothing"]):
            continue
        here = np.where(view == kind, distance, 99)
        row, column = divmod(int(here.argmin()), here.shape[1])
        where = _way(int(down[row, column]), int(right[row, column]))
        count = int((view == kind).sum())
        more = f" ({count} in view)" if count > 1 else ""
        found.append((int(here.min()), f"{SYMBOLS[kind]} {where}{more}"))
    return _listed([text for _, text in sorted(found)])


def _way(down: int, right: int) -> str:
    ways = ((down, "down" if down > 0 else "up"), (right, "right" if right > 0 else "left"))
    return " ".join(f"{abs(steps)} {name}" for steps, name in ways if steps)


def _listed(items: list[str]) -> str:
    return ", ".join(items) if items else "nothing"
