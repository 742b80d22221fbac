"""Rules of Crafter as tables: materials, items, recipes and achievements (Hafner, 2021).

The tables are read from the package's `data.yaml`. A position is one integer in a map with a border
of four cells, so neighbours and views never leave the array; border cells have material 0 and are
always empty.

Event captions say what changed between two observations ("you collected wood"), from the inventory,
the cell ahead and the sleep flag. Achievements are left out: the reward already contains them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors


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
WAY_NAMES = {LEFT: "left", RIGHT: "right", UP: "up", DOWN: "down"}
WIDE = 9  # cells that the player sees across
HIGH = 7  # and in height
ITEM_ROWS = 2
NEAR = 2 * WIDE  # creatures further away than this (in steps) stand still
CHUNK = 12
CHUNK_ROW = -(-SIDE // CHUNK)


def place(x: int, y: int) -> int:
    """The number of a cell; x and y from 0 to 63."""
    return (x + RIM) * STRIDE + y + RIM


CHUNK_OF = [-1] * CELLS  # the chunk of every cell (-1 in the rim)
for x in range(SIDE):
    for y in range(SIDE):
        CHUNK_OF[place(x, y)] = x // CHUNK * CHUNK_ROW + y // CHUNK
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


COLLECT = {
    MATERIAL[material]: Collect(
        _amounts(node["require"]),
        _amounts(node["receive"]),
        tuple(ACHIEVEMENTS.index(f"collect_{name}") for name in node["receive"]),
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
        ACHIEVEMENTS.index(f"place_{name}"),
    )
    for name, node in _data["place"].items()
}
MAKE = {
    ACTIONS.index(f"make_{name}"): Make(
        _amounts(node["uses"]),
        tuple(MATERIAL[near] for near in node["nearby"]),
        ITEMS.index(name),
        int(node["gives"]),
        ACHIEVEMENTS.index(f"make_{name}"),
    )
    for name, node in _data["make"].items()
}


ITEM = {name: number for number, name in enumerate(ITEMS)}
VITALS = ("health", "food", "drink", "energy")
TOOLS = tuple(name for name in ITEMS if name.endswith(("pickaxe", "sword")))
GOODS = tuple(name for name in ITEMS if name not in (*VITALS, *TOOLS))
PLACED = {"table": "wood", "furnace": "stone", "stone": "stone", "plant": "sapling"}
WORTH_FACING = {
    *("water", "tree", "coal", "iron", "diamond", "table", "furnace", "cow", "zombie", "skeleton"),
    *("lava", "ripe plant"),
}
AHEAD = ((0, -1), (0, 1), (-1, 0), (1, 0))  # of the view's middle: (down, right), as in `WAYS`
NEEDED = {"symbols", "facing", "body", "inventory"}


def happened(before: Tensors, after: Tensors) -> list[str]:
    """A sentence for each of B transitions, "" where there is none.

    `before` and `after` are observations of `observe: [symbols, inventory]` from the same episode.
    """
    if not before.keys() >= NEEDED:
        raise ConfigError(
            "event captions of Crafter need both symbols and inventory: set "
            "env.observe=[symbols,inventory]"
        )
    codes = np.concatenate([_own(before), _own(after)], 1)
    return [_said(code.tobytes()) for code in codes]


def _own(obs: Tensors) -> NDArray[np.uint8]:
    """Inventory, cell ahead, facing, sleeping: [B, 19]."""
    symbols = obs["symbols"].cpu().numpy()
    facing = obs["facing"].cpu().numpy()[:, 0]
    down, right = np.array(AHEAD)[facing].T
    ahead = symbols[np.arange(len(symbols)), HIGH // 2 + down, WIDE // 2 + right]
    sleeping = obs["body"].cpu().numpy()[:, 0] > 0.5
    inventory = obs["inventory"].cpu().numpy()
    return np.concatenate(
        [inventory, ahead[:, None], facing[:, None], sleeping[:, None]], 1
    ).astype(np.uint8)


@lru_cache(maxsize=65536)
def _said(code: bytes) -> str:
    half = len(code) // 2
    old, new = code[:half], code[half:]
    more = {name: new[place] - old[place] for name, place in ITEM.items()}
    ahead = SYMBOLS[old[-3]]
    now = SYMBOLS[new[-3]]
    placed = now != ahead and now in PLACED and more[PLACED[now]] < 0
    return (
        _made(more)
        or (f"you placed {_listed(now)}" if placed else "")
        or _lived(more, ahead, bool(old[-1]), bool(new[-1]))
        or (f"you face {_listed(now)}" if now != ahead and now in WORTH_FACING else "")
    )


def _made(more: dict[str, int]) -> str:
    for name in TOOLS:
        if more[name] > 0:
            return f"you made {_listed(name.replace('_', ' '))}"
    got = [name for name in GOODS if more[name] > 0]
    return f"you collected {_listed(got[0]) if got[0] == 'sapling' else got[0]}" if got else ""


def _lived(more: dict[str, int], ahead: str, slept: bool, sleeping: bool) -> str:
    if more["food"] > 0:
        return "you ate a cow" if ahead == "cow" else "you ate a plant"
    if more["drink"] > 0:
        return "you drank water"
    if slept != sleeping:
        return "you fell asleep" if sleeping else "you woke up"
    if more["health"] < -1:
        return "you were hurt badly"
    hungry = [name for name in ("food", "drink", "energy") if more[name] < 0]
    if more["health"] < 0:
        return "you were hurt"
    words = {"food": "hungrier", "drink": "thirstier", "energy": "more tired"}
    return f"you are {words[hungry[0]]}" if hungry else ""


def _listed(name: str) -> str:
    if name in ("water", "stone", "coal", "iron", "lava"):
        return name
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
