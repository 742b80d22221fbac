"""Event captions of MiniGrid: a sentence for what changed between two observations.

Captions have the style of NetHack's messages: "you picked up the yellow key". They are derived from
the cell ahead and the agent's own cell (which holds the carried object), so they are cheap, use
only what the agent observes, and work on stored transitions. Most steps have no caption. Reaching a
goal or lava has none: the environment's reward already contains it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors
from embodied.envs.minigrid.describe import COLOURS, KIND, STATES, named

Code = tuple[int, ...]
THINGS = tuple(KIND[word] for word in ("key", "ball", "box"))
DOOR = KIND["door"]
BOX = KIND["box"]
OPEN = STATES.index("open")
LOCKED = STATES.index("locked")


def happened(before: Tensors, after: Tensors) -> list[str]:
    """A sentence for each of B transitions, "" where there is none.

    `before` and `after` hold `cells` [B, S, S, 3] and `direction` [B] of the same episode.
    ConfigError if a wrapper removed them.
    """
    if not {"cells", "direction"} <= before.keys():
        raise ConfigError(
            "event captions of MiniGrid need its cells: remove the wrappers that change them"
        )
    turned = (before["direction"] != after["direction"]).cpu().numpy()[:, None]
    codes = np.concatenate([_near(before), _near(after), turned.astype(np.uint8)], 1)
    return [_said(code.tobytes()) for code in codes]


def _near(view: Tensors) -> NDArray[np.uint8]:
    """Hand and cell ahead [B, 6]."""
    cells = view["cells"].cpu().numpy()
    half = cells.shape[1] // 2
    last = cells.shape[2] - 1
    return np.concatenate([cells[:, half, last], cells[:, half, last - 1]], 1)


@lru_cache(maxsize=65536)
def _said(code: bytes) -> str:
    hand, ahead, held, now = (tuple(code[i : i + 3]) for i in (0, 3, 6, 9))
    if hand != held:
        if held[0] in THINGS:
            return f"you picked up the {named(list(held))}"
        return f"you put down the {named(list(hand))}" if hand[0] in THINGS else ""
    return "" if ahead == now else _changed(ahead, now, bool(code[12]))


def _changed(ahead: Code, now: Code, turned: bool) -> str:
    """The cell ahead is another one, or has changed where it is."""
    if not turned and ahead[0] == DOOR:
        colour = COLOURS[ahead[1]]
        if now[:2] != ahead[:2]:
            return f"you stepped into the doorway of the {colour} door"
        if now[2] == OPEN:
            return f"you {'unlocked' if ahead[2] == LOCKED else 'opened'} the {colour} door"
        return f"you closed the {colour} door"
    if not turned and ahead[0] == BOX:
        found = f" and found the {named(list(now))} in it" if now[0] in THINGS else ""
        return f"you opened the {COLOURS[ahead[1]]} box{found}"
    return f"you face the {named(list(now))}" if now[0] in (*THINGS, DOOR) else ""
