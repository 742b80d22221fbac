"""Observations of Crafter: symbols, inventory and images; only the requested ones are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from embodied.envs.crafter.picture import SIZE, picture
from embodied.envs.crafter.rules import (
    HIGH,
    ITEMS,
    LOOKS,
    MOST,
    STRIDE,
    SYMBOL,
    SYMBOLS,
    WAYS,
    WIDE,
)
from embodied.envs.crafter.world import World

Kind = Literal["symbols", "inventory", "image"]


@dataclass(frozen=True)
class Field:
    """One observation: shape, type, and the meaning of its values."""

    shape: tuple[int, ...]
    dtype: str
    high: float | tuple[float, ...]
    unit: str = ""
    names: tuple[str, ...] = ()


FIELDS: Mapping[Kind, Mapping[str, Field]] = {
    "symbols": {
        "symbols": Field((HIGH, WIDE), "uint8", len(SYMBOLS) - 1, "symbol"),
        "facing": Field((1,), "uint8", len(WAYS) - 1, "symbol"),
        "body": Field((2,), "float32", 1.0, "", ("sleeping", "daylight")),
    },
    "inventory": {"inventory": Field((len(ITEMS),), "float32", max(MOST), "", ITEMS)},
    "image": {"image": Field((SIZE, SIZE, 3), "uint8", 255)},
}
_SYMBOL_OF_LOOK = np.array(
    [
        SYMBOL["ripe plant"] if name == "plant-ripe" else SYMBOL[name.split("-")[0] or "nothing"]
        for name in LOOKS
    ],
    np.uint8,
)


def fields(kinds: tuple[Kind, ...]) -> dict[str, Field]:
    """The observations for `kinds`, by name."""
    return {name: field for kind in kinds for name, field in FIELDS[kind].items()}


def seen(world: World) -> NDArray[np.uint8]:
    """The 7 x 9 cells in view as symbols, from the top row; creatures hide the ground."""
    player = world.player
    left = player.x - WIDE // 2
    top = player.y - HIGH // 2
    window = slice(left, left + WIDE), slice(top, top + HIGH)
    ground = np.frombuffer(world.cells, np.uint8).reshape(STRIDE, STRIDE)[window]
    look = np.frombuffer(world.look, np.uint8).reshape(STRIDE, STRIDE)[window]
    return np.where(look, _SYMBOL_OF_LOOK[look], ground).T


def observe(world: World, rows: Mapping[str, NDArray], row: int) -> None:
    """Write env `row`'s observations into the arrays in `rows`, by name."""
    for name, array in rows.items():
        if name == "symbols":
            array[row] = seen(world)
        elif name == "facing":
            array[row] = WAYS.index(world.player.way)
        elif name == "body":
            array[row] = world.player.sleeping, world.light
        elif name == "inventory":
            array[row] = world.player.inventory
        else:
            array[row] = picture(world)
