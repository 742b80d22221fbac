"""Facts of the small environments: a pendulum, a cart-pole, a wall with two gaps, a locked room."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.simclip.captions import CaptionSet, fact, fill_templates, ladder
from benchmarks.simclip.facts import SceneFacts, distances
from embodied.envs.minigrid.describe import KIND
from embodied.envs.toy.two_gap import GOAL, NEAR, WALL

ROD = ("the pendulum", "the rod", "the red rod")
TURNS = (
    ("hangs straight down", "is hanging down", "is at the very bottom"),
    ("hangs low", "is hanging low", "is far down"),
    ("is below the middle", "points a bit down", "is under the horizontal"),
    ("is horizontal", "is about level", "points sideways"),
    ("points a bit up", "is above the horizontal", "leans far over"),
    ("is nearly upright", "is almost upright", "leans a little"),
    ("is upright", "stands upright", "points straight up"),
)
PENDULUM = CaptionSet(
    (
        ladder(
            "angle of the pendulum",
            (2.8, 2.3, 1.75, 1.3, 0.75, 0.25),
            (3.1416, 0.0),
            [
                fill_templates(("{a} {r}", "here {a} {r}", "a picture: {a} {r}"), a=ROD, r=turn)
                + (
                    [
                        "swing the pendulum up and hold it there",
                        "the pendulum has been swung up",
                        "the pendulum is held up",
                        "a pendulum that stands upright",
                    ]
                    if number == len(TURNS) - 1
                    else []
                )
                for number, turn in enumerate(TURNS)
            ],
        ),
    ),
    tuple(
        fact(
            f"pendulum {side}",
            fill_templates(("{a} is on the {s}", "{a} points {s}"), a=ROD, s=words),
        )
        for side, words in (("left", ("left", "left side")), ("right", ("right", "right side")))
    ),
)


def _pendulum(named: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    angle = torch.atan2(named["sin"], named["cos"])
    # Positive angles are counterclockwise.
    flags = {"pendulum left": angle.sin() > 0.15, "pendulum right": angle.sin() < -0.15}
    return {"angle of the pendulum": angle.abs()}, flags


POLE = ("the pole", "the stick", "the pole on the cart")
LEANS = (
    ("has fallen over", "leans far over", "is about to fall"),
    ("leans a lot", "leans very much", "is quite tilted"),
    ("leans clearly", "is clearly tilted", "is rather tilted"),
    ("leans a little", "is slightly tilted", "is a bit tilted"),
    ("leans hardly at all", "is nearly upright", "is almost upright"),
    ("is upright", "stands upright", "is balanced"),
)
CART = ("the cart", "the black cart", "the wagon")
CARTPOLE = CaptionSet(
    (
        ladder(
            "lean of the pole",
            (0.21, 0.15, 0.10, 0.06, 0.025),
            (0.35, 0.0),
            [
                fill_templates(("{a} {r}", "here {a} {r}", "a picture: {a} {r}"), a=POLE, r=lean)
                + (
                    ["balance the pole on the cart", "keep the pole upright"]
                    if number == len(LEANS) - 1
                    else []
                )
                for number, lean in enumerate(LEANS)
            ],
        ),
    ),
    tuple(
        fact(f"cart {side}", fill_templates(("{a} is {s}", "{a} stands {s}"), a=CART, s=words))
        for side, words in (
            ("left", ("on the left", "to the left")),
            ("middle", ("in the middle", "at the centre")),
            ("right", ("on the right", "to the right")),
        )
    ),
)


def _cartpole(named: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    x = named["x"]
    flags = {"cart left": x < -0.7, "cart middle": x.abs() <= 0.7, "cart right": x > 0.7}
    return {"lean of the pole": named["angle"].abs()}, flags


BAR = ("the pole", "the green pole", "the inverted pendulum")
SLIDER = ("the cart", "the yellow cart", "the slider")
OFF = (
    ("at the end of the rail", "at the rail's end"),
    ("far from the middle", "a long way from the middle"),
    ("some way from the middle", "off the middle"),
    ("near the middle", "not far from the middle"),
    ("almost in the middle", "very close to the middle"),
    ("in the middle", "at the centre"),
)
INVERTED = CaptionSet(
    (
        ladder(
            "lean of the inverted pendulum",
            (0.22, 0.16, 0.11, 0.065, 0.03),
            (0.35, 0.0),
            [
                fill_templates(("{a} {r}", "here {a} {r}", "a picture: {a} {r}"), a=BAR, r=lean)
                + (
                    ["balance the pole on the cart", "keep the pole upright on the cart"]
                    if number == len(LEANS) - 1
                    else []
                )
                for number, lean in enumerate(LEANS)
            ],
        ),
        ladder(
            "place of the cart",
            (0.75, 0.5, 0.3, 0.16, 0.07),
            (1.0, 0.0),
            [
                fill_templates(
                    ("{a} is {r}", "here {a} is {r}", "a picture: {a} {r}"), a=SLIDER, r=off
                )
                for off in OFF
            ],
        ),
    ),
    tuple(
        fact(f"pole {side}", fill_templates(("{a} leans {s}", "{a} is tilted {s}"), a=BAR, s=words))
        for side, words in (("left", ("left", "to the left")), ("right", ("right", "to the right")))
    ),
)


def _inverted(named: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    angle, x = named["angle"], named["x"]
    flags = {"pole left": angle < -0.03, "pole right": angle > 0.03}
    return {"lean of the inverted pendulum": angle.abs(), "place of the cart": x.abs()}, flags


DOT = ("the point", "the red point", "the red dot")
SPOT = ("the green spot", "the green goal", "the green disc")
TWO_GAP = CaptionSet(
    (
        distances(
            "point and goal",
            (0.8, 0.6, 0.4, 0.25, 0.13, NEAR),
            1.1,
            DOT,
            SPOT,
            (
                (
                    "pass the wall through either gap and go to the goal",
                    "the point has reached the goal",
                    "the red point is at the goal",
                    "go to the green spot",
                ),
            ),
        ),
    ),
    tuple(
        fact(
            f"point {place}",
            fill_templates(("{a} is {s} the wall", "{a} {s} the wall"), a=DOT, s=words),
        )
        for place, words in (
            ("before", ("before", "in front of")),
            ("in", ("inside", "in a gap of")),
            ("behind", ("behind", "beyond")),
        )
    ),
)


def _two_gap(named: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    x, y = named["x"], named["y"]
    apart = torch.hypot(x - GOAL[0], y - GOAL[1])
    before, behind = x < WALL[0], x > WALL[1]
    flags = {"point before": before, "point behind": behind, "point in": ~before & ~behind}
    return {"point and goal": apart}, flags


AGENT = ("the agent", "the red triangle", "the red arrow")
FIELD = ("the green goal", "the goal square", "the green square")
DOORKEY = CaptionSet(
    (
        distances(
            "agent and goal square",
            (9.5, 7.5, 5.5, 3.5, 2.5, 0.5),
            12.0,
            AGENT,
            FIELD,
            (
                (
                    "use the key to open the door and then get to the goal",
                    "the agent has reached the goal",
                    "the agent is at the goal",
                    "get to the goal",
                ),
            ),
        ),
    ),
    (
        fact(
            "has key",
            fill_templates(
                ("{a} {r}",), a=AGENT, r=("has the key", "carries the key", "holds the key")
            ),
        ),
        fact(
            "no key",
            fill_templates(
                ("{a} {r}",), a=AGENT, r=("has no key", "does not have the key", "lacks a key")
            ),
        ),
        *(
            fact(
                f"door {state}",
                fill_templates(
                    ("the {d} is {s}", "here the {d} is {s}"), d=("door", "yellow door"), s=s
                ),
            )
            for state, s in (
                ("locked", ("locked", "still locked")),
                ("open", ("open", "wide open")),
                ("closed", ("closed", "unlocked but closed")),
            )
        ),
    ),
)


def _doorkey(named: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    door, key = named["door"], named["carries"] == KIND["key"]
    flags = {"has key": key, "no key": ~key}
    flags |= {
        f"door {word}": door == number for number, word in enumerate(("open", "closed", "locked"))
    }
    return {"agent and goal square": named["steps"].float()}, flags


SMALL = {
    "pendulum": SceneFacts(PENDULUM, _pendulum, "angle of the pendulum"),
    "cartpole": SceneFacts(CARTPOLE, _cartpole, "lean of the pole"),
    "inverted_pendulum": SceneFacts(INVERTED, _inverted, "lean of the inverted pendulum"),
    "two_gap": SceneFacts(TWO_GAP, _two_gap, "point and goal"),
    "minigrid_doorkey": SceneFacts(DOORKEY, _doorkey, "agent and goal square"),
}
