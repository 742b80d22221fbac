"""Clutter: five objects of `embodied.envs.grasping` shapes; put any of them down somewhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import mujoco
import numpy as np

from embodied.embodiments.arrays import constant, namespace
from embodied.envs.fr3.tasks.task import (
    Flags,
    Floats,
    Parameter,
    Params,
    Start,
    Task,
    Term,
    View,
    add_free,
    add_solid,
    axis_of,
    centimetres,
    distance,
    spread,
    upright,
)
from embodied.envs.grasping.solids import CELLS, JITTER, SHAPES

THINGS = tuple(f"thing_{i}" for i in range(5))
SLOTS = ("box_0", "box_1", "can_0", "can_1")
"""The solids of a body; a shape uses one or two of them, the others are small and inside."""
LARGEST = (0.062, 0.062, 0.052)  # half sides of the compiled solids, m
COLOURS = ((0.8, 0.25, 0.2), (0.3, 0.45, 0.7), (0.25, 0.6, 0.35), (0.8, 0.6, 0.2), (0.5, 0.3, 0.6))


def _slots() -> tuple[np.ndarray, np.ndarray]:
    """Sizes and places [shapes, 4, 3] (m) of the solids of each shape."""
    size = np.full((len(SHAPES), 4, 3), 0.001)
    place = np.tile([0.0, 0.0, 0.01], (len(SHAPES), 4, 1))
    for i, parts in enumerate(SHAPES):
        used = {"box": 0, "can": 0}
        for kind, half, at in parts:
            slot = SLOTS.index(f"{kind}_{used[kind]}")
            used[kind] += 1
            size[i, slot] = half if kind == "box" else (half[0], half[2], 0.0)
            place[i, slot] = (*at[:2], at[2] + half[2])
    return size, place


SIZES, PLACES = _slots()


def _ways(view: View) -> Floats:
    xp = namespace(view.tool)
    ways = [
        distance(view.place[name], view.memory["begin"][:, 3 * i : 3 * i + 3])
        for i, name in enumerate(THINGS)
    ]
    return xp.stack(ways, 1)


def placed(view: View) -> Floats:
    """1 where an object stands 10 cm or more away and the hand has let go."""
    return Clutter.done(view) * namespace(view.width).ones_like(view.width)


class Clutter(Task):
    """Success: one object stands upright on the table, 10 cm or more from where it was, the hand
    is 8 cm away from it, and no other object has moved by 3 cm."""

    text = "pick up an object and put it down somewhere else"
    parameters = tuple(Parameter(f"kind_{i}", 0.0, 1.0, "") for i in range(len(THINGS)))
    free = THINGS
    names = tuple(f"{name}_{axis}" for name in THINGS for axis in "xyz")
    terms: ClassVar[Mapping[str, Term]] = {"placed": placed}
    weights: ClassVar[Mapping[str, float]] = {"placed": 1.0}
    draws = len(CELLS) + 3 * len(THINGS) + 3
    horizon = 240
    front = ((1.30, 0.0, 0.75), (0.52, 0.0, 0.0), 42.0)

    def edit(self, spec: mujoco.MjSpec) -> None:
        for name, colour in zip(THINGS, COLOURS, strict=True):
            body = add_free(spec, name)
            body.explicitinertial = True
            body.mass = 0.08
            body.ipos = [0.0, 0.0, 0.015]
            body.inertia = [4e-5, 4e-5, 4e-5]
            for slot in SLOTS:
                box = slot.startswith("box")
                kind = mujoco.mjtGeom.mjGEOM_BOX if box else mujoco.mjtGeom.mjGEOM_CYLINDER
                size = LARGEST if box else (LARGEST[0], LARGEST[2], 0.0)
                at = (0.0, 0.0, LARGEST[2])
                add_solid(body, kind, size, at, (*colour, 1.0), name=f"{name}_{slot}")

    def shape(self, param: Params) -> dict[tuple[str, str], Floats]:
        fields: dict[tuple[str, str], Floats] = {}
        for i, name in enumerate(THINGS):
            value = param[f"kind_{i}"]
            xp = namespace(value)
            kind = xp.clip(xp.floor(value * len(SHAPES)), 0, len(SHAPES) - 1)
            numbers = constant(np.arange(float(len(SHAPES))), value)
            chosen = (kind[:, None] == numbers) * xp.ones_like(value)[:, None]
            for j, slot in enumerate(SLOTS):
                fields["geom_size", f"{name}_{slot}"] = chosen @ constant(SIZES[:, j], value)
                fields["geom_pos", f"{name}_{slot}"] = chosen @ constant(PLACES[:, j], value)
        return fields

    def start(self, param: Params, draws: Floats) -> Start:
        xp = namespace(draws)
        cells = xp.argsort(draws[:, : len(CELLS)], 1)
        middle = constant(np.array(CELLS), draws)
        rest = draws[:, len(CELLS) :]
        free: dict[str, tuple[Floats, Floats]] = {}
        for i, name in enumerate(THINGS):
            own = rest[:, 3 * i : 3 * i + 3]
            flat = middle[cells[:, i]] + JITTER * (2 * own[:, :2] - 1)
            place = xp.concatenate([flat, xp.zeros_like(flat[:, :1])], 1)
            free[name] = (place, upright(math.tau * own[:, 2]))
        begin = xp.concatenate([place for place, _ in free.values()], 1)
        tool = spread(rest[:, -3:], (0.36, -0.05, 0.38), (0.42, 0.05, 0.42))
        return Start(tool, xp.full_like(draws[:, 0], 0.08), free=free, memory={"begin": begin})

    def observe(self, view: View) -> Floats:
        return namespace(view.tool).concatenate([view.place[name] for name in THINGS], 1)

    @staticmethod
    def done(view: View) -> Flags:
        """[n]: the goal of the task is reached."""
        xp = namespace(view.tool)
        ways = _ways(view)
        stands = [
            (axis_of(view.turn[name])[:, 2] > 0.95)
            & (abs(view.place[name][:, 2]) < 0.006)
            & (distance(view.place[name], view.tool) > 0.08)
            for name in THINGS
        ]
        there = (ways > 0.10) & xp.stack(stands, 1)
        still = (ways < 0.03).sum(1) == len(THINGS) - 1
        return there.any(1) & still

    def success(self, view: View) -> Flags:
        return self.done(view)

    def describe(self, view: View) -> str:
        places = "; ".join(centimetres(view.place[name]) for name in THINGS)
        return f"Objects at {places}; the tool is at {centimetres(view.tool)}."
