"""Facts of the FR3 tasks, computed from the state observation, and their phrasings.

Distances are ladders of seven rungs, from very far to touching; the last rung is the task's success
criterion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.simclip.captions import CaptionSet, Fact, Ladder, fact, fill_templates, ladder

HAND = ("the hand", "the gripper", "the tool", "the robot hand")
NEAR = (
    ("very far from", "a very long way from", "extremely far away from"),
    ("far from", "a long way from", "far away from"),
    ("some way from", "at a middle distance from", "moderately far from"),
    ("near", "not far from", "in the area of"),
    ("close to", "a short way from", "beside"),
    ("very close to", "almost touching", "just beside"),
    ("touching", "right at", "exactly at"),
)
APART = ("{a} is {r} {b}", "{b} is {r} {a}", "here {a} is {r} {b}", "a picture of {a} {r} {b}")


@dataclass(frozen=True)
class SceneFacts:
    """The facts of an environment and how to compute them: `read(named)` maps the state's elements
    [n] by name to the ladders' quantities and the flags of plain facts, by name. `climbs`: the
    ladder that measures success."""

    words: CaptionSet
    read: Callable[[dict[str, Tensor]], tuple[dict[str, Tensor], dict[str, Tensor]]]
    climbs: str


def distances(
    name: str,
    edges: tuple[float, ...],
    far: float,
    ones: tuple[str, ...],
    others: tuple[str, ...],
    more: tuple[tuple[str, ...], ...] = (),
) -> Ladder:
    """The ladder of the distance of two things (m); `more`: further phrasings of the last rungs."""
    rungs = [fill_templates(APART, a=ones, r=near, b=others) for near in NEAR]
    for back, extra in enumerate(more, start=1):
        rungs[-back] += list(extra)
    return ladder(name, edges, (far, 0.0), rungs)


def point(named: dict[str, Tensor], name: str) -> Tensor:
    """The three elements `name_x, name_y, name_z` as [n, 3]."""
    return torch.stack([named[f"{name}_{axis}"] for axis in "xyz"], 1)


def length(vector: Tensor) -> Tensor:
    return vector.norm(dim=1)


def _sides(name: str, things: tuple[str, ...]) -> tuple[Fact, ...]:
    """Facts about where on the table something is, as seen by the camera."""
    said = ("{a} is on the {s} of the table", "{a} stands {s}", "{s}: {a}", "{a} is to the {s}")
    sides = {"left": ("left", "left side"), "right": ("right", "right side")}
    return tuple(fact(f"{name} {k}", fill_templates(said, a=things, s=v)) for k, v in sides.items())


def _aside(named: dict[str, Tensor], place: str, name: str) -> dict[str, Tensor]:
    # The camera looks along the table's diagonal from its right front corner.
    right = 0.57 * point(named, place)[:, 0] + 0.82 * point(named, place)[:, 1] > 0.285
    return {f"{name} left": ~right, f"{name} right": right}


BALL = ("the ball", "the green ball", "the green goal", "the goal ball")
REACH = CaptionSet(
    (
        distances(
            "hand and ball",
            (0.30, 0.20, 0.13, 0.08, 0.045, 0.02),
            0.5,
            HAND,
            BALL,
            (
                (
                    "move the tool to the green ball",
                    "the tool has been moved to the green ball",
                    "the hand has reached the ball",
                    "the gripper has reached the green ball",
                    "the tool is on the ball",
                    "reach the ball",
                    "touch the green ball with the hand",
                ),
            ),
        ),
    ),
    _sides("ball", BALL),
)


def _reach(named: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    apart = length(point(named, "goal_from_tool"))
    return {"hand and ball": apart}, _aside(named, "goal", "ball")


BLUE = ("the blue cube", "the cube", "the blue box")
DISC = ("the disc", "the green disc", "the green circle")
HAND_CUBE = (0.25, 0.17, 0.12, 0.085, 0.06, 0.04)
PUSH = CaptionSet(
    (
        distances("hand and blue cube", HAND_CUBE, 0.4, HAND, BLUE),
        distances(
            "cube and disc",
            (0.19, 0.15, 0.115, 0.08, 0.05, 0.025),
            0.3,
            BLUE,
            DISC,
            (
                (
                    "push the cube onto the green disc",
                    "the cube has been pushed onto the green disc",
                    "the cube is on the disc",
                    "the blue cube is on the green disc",
                    "the blue cube lies on the disc",
                    "the cube covers the green disc",
                    "push the blue cube onto the disc",
                ),
            ),
        ),
    ),
    _sides("blue cube", BLUE),
)


def _push(named: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    quantities = {
        "hand and blue cube": length(point(named, "cube_from_tool")),
        "cube and disc": length(point(named, "goal_from_cube")),
    }
    return quantities, _aside(named, "cube", "blue cube")


RED = ("the red cube", "the cube", "the red box")
HEIGHTS = (
    ("on the table", "down on the table", "lying on the table"),
    ("barely off the table", "just off the table", "barely above the table"),
    ("a little above the table", "slightly above the table", "a bit above the table"),
    ("somewhat above the table", "a few centimetres above the table", "low above the table"),
    ("well above the table", "clearly above the table", "at some height above the table"),
    ("high above the table", "nearly raised all the way", "almost lifted"),
    ("raised", "lifted up", "very high above the table"),
)
LIFT = CaptionSet(
    (
        distances("hand and red cube", (*HAND_CUBE[:-1], 0.02), 0.4, HAND, RED),
        ladder(
            "height of the cube",
            (0.003, 0.015, 0.035, 0.06, 0.08, 0.10),
            (0.0, 0.16),
            [
                fill_templates(
                    ("{a} is {r}", "here {a} is {r}", "a picture of {a} {r}"), a=RED, r=high
                )
                for high in HEIGHTS[:-1]
            ]
            + [
                [
                    *fill_templates(("{a} is {r}", "here {a} is {r}"), a=RED, r=HEIGHTS[-1]),
                    "pick up the cube and raise it ten centimetres above the table",
                    "the cube has been picked up",
                    "the hand has picked up the cube",
                    "the red cube has been lifted",
                    "lift the cube",
                    "pick up the red cube",
                ]
            ],
        ),
    ),
    (
        fact("hand open", fill_templates(("{a} is open", "{a} has opened", "open: {a}"), a=HAND)),
        fact(
            "hand closed",
            fill_templates(("{a} is closed", "{a} has closed", "closed: {a}"), a=HAND),
        ),
        fact("holds", fill_templates(("{a} is holding {b}", "{b} is held by {a}"), a=HAND, b=RED)),
        *_sides("red cube", RED),
    ),
)


def _lift(named: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    apart = length(point(named, "cube_from_tool"))
    quantities = {
        "hand and red cube": apart,
        "height of the cube": (named["cube_z"] - named["cube_half"]).clamp(min=0.0),
    }
    flags = {
        "hand open": named["width"] > 0.06,
        "hand closed": named["width"] < 0.02,
        "holds": (apart < 0.02) & (named["width"] < 2.6 * named["cube_half"]),
        **_aside(named, "cube", "red cube"),
    }
    return quantities, flags


PEG = ("the peg", "the yellow peg", "the pin")
HOLE = ("the hole", "the socket", "the block with the hole")
INSERT = CaptionSet(
    (
        distances(
            "peg and hole",
            (0.085, 0.065, 0.05, 0.036, 0.022, 0.004),
            0.13,
            PEG,
            HOLE,
            (
                (
                    "the peg is in the hole",
                    "the yellow peg is inside the hole",
                    "the peg has been put into the hole",
                    "insert the peg in the hole of the block",
                    "put the peg into the hole",
                    "insert the peg",
                ),
            ),
        ),
    ),
    (),
)


def _insert(named: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    # In the hole is two centimetres below its rim.
    deep = point(named, "tip_from_hole") + torch.tensor([0.0, 0.0, 0.02])
    return {"peg and hole": length(deep)}, {}


FR3 = {
    "reach": SceneFacts(REACH, _reach, "hand and ball"),
    "push": SceneFacts(PUSH, _push, "cube and disc"),
    "lift": SceneFacts(LIFT, _lift, "height of the cube"),
    "insert": SceneFacts(INSERT, _insert, "peg and hole"),
}
