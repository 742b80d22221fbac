"""Rules of Crafter as tables: materials, items, recipes and achievements (Hafner, 2021).

The tables are read from the package's `data.yaml`. A position is one integer in a map with a border
of four cells, so neighbours and views never leave the array; border cells have material 0 and are
always empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml


def _package() -> Path:
    found = find_spec("crafter")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(
            "Crafter is not installed; type: pip install 'embodied-rl[crafter]'", name="crafter"
        )
    return Path(found.submodule_search_locations[0])


PACKAGE = _package()
_data: dict[str, Any] = yaml.safe_load((PACKAGE / "data.yaml").read_text())

ACTIONS: tuple[str, ...] = tuple(_data["actions"])
ITEMS: tuple[str, ...] = tuple(_data["items"])
INITIAL = tuple(int(item["initial"]) for item in _data["items"].values())
MOST = tuple(int(item["max"]) for item in _data["items"].values())
ACHIEVEMENTS: tuple[str, ...] = tuple(_data["achievements"])

# Symbols: 0 is outside of the map, then the package's numbers, then a plant with fruit.
MATERIALS: tuple[str, ...] = tuple(_data["materials"])
CREATURES = ("player", "cow", "zombie", "skeleton", "arrow", "plant")
SYMBOLS = ("nothing", *MATERIALS, *CREATURES, "ripe plant")
SYMBOL = {name: number for number, name in enumerate(SYMBOLS)}
MATERIAL = {name: 1 + number for number, name in enumerate(MATERIALS)}
WATER = MATERIAL["water"]
GRASS = MATERIAL["grass"]
STONE = MATERIAL["stone"]
PATH, SAND, TREE, LAVA = (MATERIAL[name] for name in ("path", "sand", "tree", "lava"))
COAL = MATERIAL["coal"]
IRON = MATERIAL["iron"]
DIAMOND = MATERIAL["diamond"]
TABLE = MATERIAL["table"]
FURNACE = MATERIAL["furnace"]

# The sprite of the object on a cell; 0: none.
LOOKS = (
    *("", "player-left", "player-right", "player-up", "player-down", "player-sleep"),
    *("cow", "zombie", "skeleton", "arrow-left", "arrow-right", "arrow-up", "arrow-down"),
    *("plant", "plant-ripe"),
)
LOOK = {name: number for number, name in enumerate(LOOKS)}

SIDE = 64
RIM = 4
STRIDE = SIDE + 2 * RIM
CELLS = STRIDE * STRIDE
LEFT, RIGHT, UP, DOWN = WAYS = (-STRIDE, STRIDE, -1, 1)  # x goes right, y goes down
WIDE = 9  # cells that the player sees across
HIGH = 7  # and in height
ITEM_ROWS = 2
NEAR = 2 * WIDE  # creatures further away than this (in steps) stand still
CHUNK = 12
CHUNK_ROW = -(-SIDE // CHUNK)


def place(x: int, y: int) -> int:
    """The number of a cell; x and y from 0 to 63."""
    return (x + RIM) * STRIDE + y + RIM


def _chunks() -> list[int]:
    """The chunk of every cell (-1 in the rim)."""
    chunks = [-1] * CELLS
    for x in range(SIDE):
        for y in range(SIDE):
            chunks[place(x, y)] = x // CHUNK * CHUNK_ROW + y // CHUNK
    return chunks


CHUNK_OF = _chunks()
CHUNK_CELLS = tuple(
    tuple(at for at in range(CELLS) if CHUNK_OF[at] == chunk) for chunk in range(CHUNK_ROW**2)
)


def _table(*names: str) -> bytes:
    return bytes(name in names for name in (None, *MATERIALS))


WALKABLE = _table(*_data["walkable"])
WALKABLE_PLAYER = _table(*_data["walkable"], "lava")
WALKABLE_ARROW = _table(*_data["walkable"], "water", "lava")

Amounts = tuple[tuple[int, int], ...]  # (item, how many)


@dataclass(frozen=True)
class Collect:
    """Taking from a material: what has to be in hand, what is got, what is left behind."""

    needs: Amounts
    gives: Amounts
    achieved: tuple[int, ...]
    leaves: int
    chance: float


@dataclass(frozen=True)
class Place:
    """Putting something down: what it costs, and on which materials it may stand."""

    costs: Amounts
    where: bytes
    material: int  # 0: a plant
    achieved: int


@dataclass(frozen=True)
class Make:
    """Making a tool: what it costs, what has to be near."""

    costs: Amounts
    near: tuple[int, ...]
    item: int
    gives: int
    achieved: int


def _amounts(node: dict[str, int]) -> Amounts:
    return tuple((ITEMS.index(name), int(count)) for name, count in node.items())


def _achievement(name: str) -> int:
    return ACHIEVEMENTS.index(name)


COLLECT = {
    MATERIAL[material]: Collect(
        _amounts(node["require"]),
        _amounts(node["receive"]),
        tuple(_achievement(f"collect_{name}") for name in node["receive"]),
        MATERIAL[node["leaves"]],
        float(node.get("probability", 1)),
    )
    for material, node in _data["collect"].items()
}
PLACE = {
    ACTIONS.index(f"place_{name}"): Place(
        _amounts(node["uses"]),
        _table(*node["where"]),
        MATERIAL[name] if node["type"] == "material" else 0,
        _achievement(f"place_{name}"),
    )
    for name, node in _data["place"].items()
}
MAKE = {
    ACTIONS.index(f"make_{name}"): Make(
        _amounts(node["uses"]),
        tuple(MATERIAL[near] for near in node["nearby"]),
        ITEMS.index(name),
        int(node["gives"]),
        _achievement(f"make_{name}"),
    )
    for name, node in _data["make"].items()
}
