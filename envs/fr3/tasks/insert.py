"""Insert: insert a held peg into a hole that is less than half a millimetre wider than the peg.

The observed hole position has a constant error per episode, as from a calibrated camera. The
position of the peg tip relative to the true hole is observed exactly, as from a wrist camera. An
open-loop plan from the first observation misses; closed-loop correction succeeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import mujoco

from embodied.embodiments.arrays import constant, namespace
from embodied.envs.fr3.tasks.task import (
    STIFF,
    Flags,
    Floats,
    Parameter,
    Params,
    Start,
    Task,
    Term,
    View,
    axis_of,
    centimetres,
    spread,
)

HOLE = 0.010  # half the width of the square hole, m
BLOCK = 0.035  # half the width of the block, m
TOP = 0.030  # height of the block, m
HANDLE = 0.012  # half width of the part that is held, m
TIP = -0.055  # the tip below the body's origin (the middle of the handle), m
CHAMFER = 0.0002
DEPTH = 0.02
LIGHT = (0.93, 0.69, 0.13, 1.0)
DARK = (0.30, 0.34, 0.40, 1.0)


def tip_from_hole(view: View) -> Floats:
    """The peg's tip [n, 3] against the middle of the hole's rim."""
    tip = view.place["peg"] + TIP * axis_of(view.turn["peg"])
    return tip - _rim(view)


def above(view: View) -> Floats:
    """The tip is on the hole's axis."""
    away = _from_axis(tip_from_hole(view))
    return 1 - namespace(away).tanh(away / 0.01)


def inserted(view: View) -> Floats:
    """The share of the way in that the tip has gone, in [0, 1], counted on the axis only."""
    tip = tip_from_hole(view)
    xp = namespace(tip)
    return xp.where(_from_axis(tip) < 0.002, xp.clip(-tip[:, 2] / DEPTH, 0.0, 1.0), 0.0)


def _rim(view: View) -> Floats:
    """The middle of the hole's rim [n, 3]."""
    return view.place["hole"] + constant((0.0, 0.0, TOP), view.place["hole"])


def _from_axis(tip: Floats) -> Floats:
    """The distance [n] (m) of tips [n, 3] against the rim from the hole's axis."""
    return namespace(tip).linalg.norm(tip[:, :2], axis=1)


class Insert(Task):
    """Success: the tip is two centimetres deep in the hole."""

    text = "insert the peg in the hole of the block"
    parameters = (
        Parameter("hole_x", 0.42, 0.58),
        Parameter("hole_y", -0.12, 0.12),
        Parameter("clearance", 0.0004, 0.0005),
        Parameter("hole_error", 0.0, 0.005),
    )
    free = ("peg",)
    markers = ("hole",)
    names = (
        *(f"hole_seen_{axis}" for axis in "xyz"),
        *(f"tip_from_hole_{axis}" for axis in "xyz"),
        *(f"peg_from_tool_{axis}" for axis in "xyz"),
    )
    terms: ClassVar[Mapping[str, Term]] = {"above": above, "inserted": inserted}
    weights: ClassVar[Mapping[str, float]] = {"above": 0.4, "inserted": 0.6}
    draws = 6
    horizon = 80
    settle = 40

    def edit(self, spec: mujoco.MjSpec) -> None:
        _peg(spec)
        # Four walls around a square hole; a mocap body, so that each row can put it elsewhere.
        body = spec.worldbody.add_body(name="hole", mocap=True)
        wall = (BLOCK - HOLE) / 2
        middle = HOLE + wall
        for name, half, place in (
            ("right", (wall, BLOCK), (middle, 0.0)),
            ("left", (wall, BLOCK), (-middle, 0.0)),
            ("back", (HOLE, wall), (0.0, middle)),
            ("front", (HOLE, wall), (0.0, -middle)),
        ):
            body.add_geom(
                name=f"wall_{name}",
                type=mujoco.mjtGeom.mjGEOM_BOX,
                size=[*half, TOP / 2],
                pos=[*place, TOP / 2],
                rgba=DARK,
            )

    def shape(self, param: Params) -> dict[tuple[str, str], Floats]:
        radius = HOLE - param["clearance"]
        xp = namespace(radius)
        zero = xp.zeros_like(radius)
        shaft = xp.stack([radius, xp.full_like(radius, 0.018), zero], 1)
        tip = xp.stack([radius - CHAMFER, xp.full_like(radius, 0.02), zero], 1)
        return {("geom_size", "shaft"): shaft, ("geom_size", "tip"): tip}

    def start(self, param: Params, draws: Floats) -> Start:
        count = len(draws)
        xp = namespace(draws)
        zero = xp.zeros_like(draws[:, 0])
        hole = xp.stack([param["hole_x"], param["hole_y"], zero], 1)
        away = spread(draws[:, :3], (-0.05, -0.05, 0.02), (0.05, 0.05, 0.06))
        angle = 2 * math.pi * draws[:, 3]
        wrong = xp.stack([xp.cos(angle), xp.sin(angle), zero], 1)
        slip = spread(draws[:, 4:6], (-0.002, -0.003), (0.002, 0.003))
        held = xp.stack([slip[:, 0], zero, slip[:, 1]], 1)
        ready = hole + constant((0.0, 0.0, TOP - TIP), hole)
        return Start(
            tool=ready + away,
            width=xp.full_like(zero, 2 * HANDLE - 0.0002),
            marker={"hole": hole},
            memory={"wrong": param["hole_error"][:, None] * wrong},
            held={"peg": (held, xp.tile(constant((1.0, 0.0, 0.0, 0.0), held), (count, 1)))},
        )

    def observe(self, view: View) -> Floats:
        seen = _rim(view) + view.memory["wrong"]
        peg = view.place["peg"]
        return namespace(peg).concatenate([seen, tip_from_hole(view), peg - view.tool], 1)

    def success(self, view: View) -> Flags:
        tip = tip_from_hole(view)
        return (tip[:, 2] < -DEPTH) & (_from_axis(tip) < 0.002)

    def describe(self, view: View) -> str:
        tip = 1000 * tip_from_hole(view)[0]
        return (
            f"The peg's tip is {tip[0]:.1f} mm in x, {tip[1]:.1f} mm in y and {tip[2]:.1f} mm in z "
            f"from the middle of the hole's rim; the tool is at {centimetres(view.tool)}."
        )


def _peg(spec: mujoco.MjSpec) -> None:
    """A square handle, a round shaft and a slightly thinner tip."""
    body = spec.worldbody.add_body(name="peg")
    body.add_freejoint(name="peg")
    box = mujoco.mjtGeom.mjGEOM_BOX
    cylinder = mujoco.mjtGeom.mjGEOM_CYLINDER
    body.add_geom(
        name="handle",
        type=box,
        size=[HANDLE, HANDLE, 0.015],
        rgba=LIGHT,
        mass=0.03,
        condim=4,
        priority=1,
        friction=[1.5, 0.02, 0.001],
        solref=STIFF,
    )
    for name, radius, half in (("shaft", HOLE, 0.018), ("tip", HOLE - CHAMFER, 0.02)):
        body.add_geom(
            name=name,
            type=cylinder,
            size=[radius, half, 0],
            pos=[0, 0, -0.015 - half],
            rgba=LIGHT,
            mass=0.01,
            priority=1,
            friction=[0.2, 0.005, 0.0001],
            solref=STIFF,
        )
