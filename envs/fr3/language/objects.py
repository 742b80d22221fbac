"""The objects of the language tasks: blocks, bowl, plate, can, cabinet with a drawer, button.

Lengths are in metres. The cabinet and the button stand where their mocap bodies are put; drawer and
button cap slide on joints of their own.
"""

from __future__ import annotations

import math

import mujoco

from embodied.envs.fr3.tasks.task import STIFF, Rgba, add_box

BLOCK = 0.02
"""Half the side of a block."""
BOWL = 0.052
RIM = 0.037
"""Distance of the bowl's walls from its middle, and its height."""
PLATE = 0.055
THICK = 0.006
"""Radius of the plate, and half its thickness."""
CAN = 0.025
"""Half the height of the can."""
CABINET = (0.075, 0.08, 0.07)
"""Half the cabinet's width (x) and depth (y), and its height."""
KNOB = 0.112
"""Distance of the knob from the cabinet's middle when the drawer is closed."""
TRAVEL = 0.14
"""How far the drawer opens."""
PRESS = 0.01
"""How far the button's cap goes down."""

COLOURS: dict[str, Rgba] = {
    "red": (0.85, 0.13, 0.10, 1.0),
    "blue": (0.12, 0.25, 0.85, 1.0),
    "green": (0.12, 0.62, 0.22, 1.0),
}
BLOCKS = tuple(COLOURS)
MOVABLE = (*BLOCKS, "bowl", "plate", "can")
FIXED = ("cabinet", "button")
JOINTS = ("drawer", "cap")
BOX = mujoco.mjtGeom.mjGEOM_BOX
CYLINDER = mujoco.mjtGeom.mjGEOM_CYLINDER


def add_objects(spec: mujoco.MjSpec) -> None:
    """Add all objects to the scene."""
    # Software rendering pays for every triangle: MuJoCo draws a face of a box as 32 of them.
    quality = spec.visual.quality
    quality.numquads = 1
    quality.numslices = 16
    quality.numstacks = 2
    for name, rgba in COLOURS.items():
        add_box(spec, name, (BLOCK, BLOCK, BLOCK), rgba, 0.06)
    _bowl(_free(spec, "bowl"))
    _plate(_free(spec, "plate"))
    can = _free(spec, "can")
    _geom(can, CYLINDER, (0.02, CAN, 0.0), (0.0, 0.0, 0.0), (0.95, 0.55, 0.10, 1.0), 0.08)
    # A box without a front, and a drawer that slides out towards -y, with a knob.
    wood = (0.42, 0.28, 0.18, 1.0)
    front = (0.72, 0.52, 0.32, 1.0)
    metal = (0.15, 0.15, 0.17, 1.0)
    cabinet = spec.worldbody.add_body(name="cabinet", mocap=True)
    x, y, height = CABINET
    _geom(cabinet, BOX, (x, y, 0.004), (0.0, 0.0, height - 0.004), wood)
    _geom(cabinet, BOX, (x, 0.004, 0.033), (0.0, y - 0.004, 0.033), wood)
    for side in (-1, 1):
        _geom(cabinet, BOX, (0.004, y, 0.033), (side * (x - 0.004), 0.0, 0.033), wood)
    drawer = _slide(cabinet, "drawer", (0.0, -1.0, 0.0), TRAVEL, damping=4.0, friction=0.6)
    _geom(drawer, BOX, (0.062, 0.065, 0.003), (0.0, -0.012, 0.008), front, 0.15)
    _geom(drawer, BOX, (0.070, 0.004, 0.018), (0.0, -0.084, 0.024), front, 0.05)
    _geom(drawer, BOX, (0.062, 0.003, 0.015), (0.0, 0.050, 0.024), front, 0.05)
    for side in (-1, 1):
        _geom(drawer, BOX, (0.003, 0.065, 0.015), (side * 0.062, -0.012, 0.024), front, 0.05)
    _geom(drawer, BOX, (0.008, 0.016, 0.005), (0.0, 0.024 - KNOB, 0.035), metal, 0.02)
    _geom(drawer, BOX, (0.009, 0.008, 0.022), (0.0, -KNOB, 0.053), metal, 0.03)
    spec.add_exclude(bodyname1="cabinet", bodyname2="drawer")
    button = spec.worldbody.add_body(name="button", mocap=True)
    _geom(button, CYLINDER, (0.032, 0.008, 0.0), (0.0, 0.0, 0.008), (0.2, 0.2, 0.22, 1.0))
    cap = _slide(button, "cap", (0.0, 0.0, -1.0), PRESS, damping=3.0, stiffness=150.0)
    _geom(cap, CYLINDER, (0.021, 0.008, 0.0), (0.0, 0.0, 0.026), (0.62, 0.15, 0.70, 1.0), 0.03)
    cap.gravcomp = 1.0
    spec.add_exclude(bodyname1="button", bodyname2="cap")


def _bowl(body: mujoco.MjsBody) -> None:
    """A round floor and eight walls; the body's origin is the middle of its underside."""
    rgba = (0.93, 0.93, 0.90, 1.0)
    _geom(body, CYLINDER, (BOWL, 0.003, 0.0), (0.0, 0.0, 0.003), rgba, 0.12)
    # The walls do not reach the table: 32 contacts less in every step.
    half = (0.004, BOWL * math.tan(math.pi / 8) + 0.002, RIM / 2 - 0.001)
    for side in range(8):
        angle = side * math.pi / 4
        place = (BOWL * math.cos(angle), BOWL * math.sin(angle), RIM / 2 + 0.001)
        wall = _geom(body, BOX, half, place, rgba, 0.02)
        wall.quat = [math.cos(angle / 2), 0.0, 0.0, math.sin(angle / 2)]


def _plate(body: mujoco.MjsBody) -> None:
    rgba = (0.96, 0.82, 0.20, 1.0)
    _geom(body, CYLINDER, (PLATE, THICK, 0.0), (0.0, 0.0, 0.0), rgba, 0.12, friction=0.3)


def _free(spec: mujoco.MjSpec, name: str) -> mujoco.MjsBody:
    body = spec.worldbody.add_body(name=name)
    body.add_freejoint(name=name)
    return body


def _slide(
    parent: mujoco.MjsBody,
    name: str,
    axis: tuple[float, float, float],
    travel: float,
    damping: float,
    friction: float = 0.0,
    stiffness: float = 0.0,
) -> mujoco.MjsBody:
    """A body on a slide joint from 0 to `travel`, with an end stop on either side."""
    body = parent.add_body(name=name)
    joint = body.add_joint(name=name, type=mujoco.mjtJoint.mjJNT_SLIDE, axis=axis)
    joint.limited = mujoco.mjtLimited.mjLIMITED_TRUE
    joint.range = [0.0, travel]
    joint.armature = 0.05
    joint.frictionloss = friction
    joint.damping[0] = damping
    joint.stiffness[0] = stiffness
    return body


def _geom(
    body: mujoco.MjsBody,
    kind: mujoco.mjtGeom,
    size: tuple[float, float, float],
    place: tuple[float, float, float],
    rgba: Rgba,
    mass: float = 0.0,
    friction: float = 1.0,
) -> mujoco.MjsGeom:
    """A solid with its own friction (priority over the table and the pads)."""
    return body.add_geom(
        type=kind,
        size=size,
        pos=place,
        rgba=rgba,
        mass=mass,
        condim=4,
        priority=1,
        friction=[friction, 0.01, 0.001],
        solref=STIFF,
    )
