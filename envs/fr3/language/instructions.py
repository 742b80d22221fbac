"""The ten instructions of the language tasks: a name, a sentence, and when it is done.

Predicates are pure functions of an `embodied.envs.fr3.tasks.task.View` of n envs and return bool
[n]. What is put somewhere has to be let go of. Sentences are word numbers of one vocabulary too;
0 is "no word".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from embodied.core.build import ConfigError, nearest
from embodied.core.spec import SYMBOL, Leaf
from embodied.envs.fr3.language.objects import BLOCK, CABINET, RIM, THICK
from embodied.envs.fr3.tasks.task import Flags, View

Predicate = Callable[[View], Flags]


@dataclass(frozen=True)
class Instruction:
    """`name` for settings, `text` for policies, `done` of a View of n envs, [n]."""

    name: str
    text: str
    done: Predicate


def released(view: View) -> Flags:
    """The hand is open wider than a block."""
    return view.width > 2 * BLOCK + 0.008


def above(view: View, thing: str, base: str, low: float, high: float) -> Flags:
    """The middle of `thing` is between `low` and `high` (m) above the origin of `base`."""
    height = view.place[thing][:, 2] - view.place[base][:, 2]
    return (height > low) & (height < high)


def beside(view: View, thing: str, base: str, most: float) -> Flags:
    """`thing` and `base` are at most `most` m apart, seen from above."""
    return np.linalg.norm((view.place[thing] - view.place[base])[:, :2], axis=1) < most


def into_bowl(block: str) -> Predicate:
    """The block lies inside the bowl, below its rim."""

    def done(view: View) -> Flags:
        low = above(view, block, "bowl", 0.0, RIM)
        return low & beside(view, block, "bowl", 0.04) & released(view)

    return done


def onto_plate(block: str) -> Predicate:
    """The block lies on the plate."""

    def done(view: View) -> Flags:
        height = THICK + BLOCK
        lies = above(view, block, "plate", height - 0.006, height + 0.006)
        return lies & beside(view, block, "plate", 0.05) & released(view)

    return done


def stacked(block: str, base: str) -> Predicate:
    """The block lies on the other block."""

    def done(view: View) -> Flags:
        lies = above(view, block, base, 2 * BLOCK - 0.006, 2 * BLOCK + 0.006)
        return lies & beside(view, block, base, 0.025) & released(view)

    return done


def onto_cabinet(block: str) -> Predicate:
    """The block lies on top of the cabinet."""

    def done(view: View) -> Flags:
        x, y = np.abs(view.place[block] - view.place["cabinet"])[:, :2].T
        height = CABINET[2] + BLOCK
        lies = above(view, block, "cabinet", height - 0.006, height + 0.006)
        return lies & (x < CABINET[0]) & (y < CABINET[1]) & released(view)

    return done


def into_drawer(block: str) -> Predicate:
    """The block lies inside the drawer, which may be open or closed."""

    def done(view: View) -> Flags:
        x, y = (view.place[block] - view.place["cabinet"])[:, :2].T
        y = y + view.joint["drawer"]
        inside = (np.abs(x) < 0.059) & (y > -0.08) & (y < 0.047)
        return inside & above(view, block, "cabinet", 0.0, 0.045) & released(view)

    return done


def drawer_open(view: View) -> Flags:
    """The drawer is at least 12.5 cm out (it begins 7 to 9 cm out)."""
    return view.joint["drawer"] > 0.125


def drawer_closed(view: View) -> Flags:
    """The drawer is at most 1.2 cm out."""
    return view.joint["drawer"] < 0.012


def button_pressed(view: View) -> Flags:
    """The cap of the button is 7 mm down."""
    return view.joint["cap"] > 0.007


def plate_left(view: View) -> Flags:
    """The plate is 10 cm further left than it began, flat on the table."""
    moved = (view.place["plate"] - view.memory["plate_from"])[:, 1]
    return (moved > 0.10) & (view.place["plate"][:, 2] < 2 * THICK)


INSTRUCTIONS = (
    Instruction("red_into_bowl", "put the red block into the bowl", into_bowl("red")),
    Instruction("blue_into_bowl", "put the blue block into the bowl", into_bowl("blue")),
    Instruction("green_onto_plate", "put the green block onto the plate", onto_plate("green")),
    Instruction(
        "blue_onto_green", "stack the blue block on the green block", stacked("blue", "green")
    ),
    Instruction("red_into_drawer", "put the red block into the drawer", into_drawer("red")),
    Instruction(
        "green_onto_cabinet", "put the green block on top of the cabinet", onto_cabinet("green")
    ),
    Instruction("open_drawer", "open the drawer", drawer_open),
    Instruction("close_drawer", "close the drawer", drawer_closed),
    Instruction("press_button", "press the button", button_pressed),
    Instruction("push_plate_left", "push the plate to the left", plate_left),
)
NAMES = tuple(each.name for each in INSTRUCTIONS)


def chosen(names: tuple[str, ...]) -> tuple[int, ...]:
    """The numbers of the named instructions, in order; ConfigError."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"env.tasks: unknown task {name!r}{nearest(name, NAMES)}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"env.tasks: name each task once, at least one of {', '.join(NAMES)}")
    return tuple(NAMES.index(name) for name in names)


SENTENCES = tuple(each.text for each in INSTRUCTIONS)
WORDS = tuple(sorted({word for text in SENTENCES for word in text.split()}))
LENGTH = max(len(text.split()) for text in SENTENCES)
LEAF = Leaf((LENGTH,), "uint8", 0, len(WORDS), SYMBOL)


def tokens(text: str) -> list[int]:
    """The words of `text` as LENGTH numbers, 0 after its end; ValueError for unknown words."""
    words = text.split()
    unknown = [word for word in words if word not in WORDS]
    if unknown or len(words) > LENGTH:
        raise ValueError(f"not a sentence of these tasks: {text!r}")
    return [*(WORDS.index(word) + 1 for word in words), *[0] * (LENGTH - len(words))]


TOKENS = np.array([tokens(text) for text in SENTENCES], np.uint8)
"""The tokens of every instruction, [10, LENGTH]."""
