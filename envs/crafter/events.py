"""Event captions of Crafter: a sentence for what changed between two observations.

Examples: "you collected wood", "you placed a table", "you made a wood pickaxe". Captions are
derived from the inventory, the cell ahead and the sleep flag, all of which the player observes.
Achievements are left out: the environment's reward already contains them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors
from embodied.envs.crafter.rules import HIGH, ITEMS, SYMBOLS, WIDE

ITEM = {name: number for number, name in enumerate(ITEMS)}
VITALS = ("health", "food", "drink", "energy")
TOOLS = tuple(name for name in ITEMS if name.endswith(("pickaxe", "sword")))
GOODS = tuple(name for name in ITEMS if name not in (*VITALS, *TOOLS))
PLACED = {"table": "wood", "furnace": "stone", "stone": "stone", "plant": "sapling"}
WORTH_FACING = {
    *("water", "tree", "coal", "iron", "diamond", "table", "furnace", "cow", "zombie", "skeleton"),
    *("lava", "ripe plant"),
}
AHEAD = ((0, -1), (0, 1), (-1, 0), (1, 0))  # (down, right), in the order of `facing`
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
    return (
        _made(more)
        or _placed(more, ahead, now)
        or _lived(more, ahead, bool(old[-1]), bool(new[-1]))
        or (f"you face {_listed(now)}" if now != ahead and now in WORTH_FACING else "")
    )


def _made(more: dict[str, int]) -> str:
    for name in TOOLS:
        if more[name] > 0:
            return f"you made {_listed(name.replace('_', ' '))}"
    got = [name for name in GOODS if more[name] > 0]
    return f"you collected {_listed(got[0]) if got[0] == 'sapling' else got[0]}" if got else ""


def _placed(more: dict[str, int], ahead: str, now: str) -> str:
    there = now != ahead and now in PLACED and more[PLACED[now]] < 0
    return f"you placed {_listed(now)}" if there else ""


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
