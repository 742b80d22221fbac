"""MuJoCo scene that renders a quadrotor; it is not simulated."""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.embodiments.crazyflie import BOX, Vehicle
from embodied.envs.mujoco.cameras import Cameras, Image, looking

PROPELLER = 0.023
"""Radius, m."""
BLUE = [0.15, 0.35, 0.75, 1.0]
ORANGE = [0.95, 0.5, 0.1, 1.0]
DARK = [0.12, 0.12, 0.14, 1.0]
PALE = [0.8, 0.82, 0.85, 1.0]


EYE = (1.1, -0.5, 0.45)
"""Where the camera is, m."""


class Sight:
    """One vehicle in its box, posed as it is told to."""

    def __init__(self, vehicle: Vehicle) -> None:
        self.model = compile_scene(vehicle)
        self.data = mujoco.MjData(self.model)
        self.cameras = Cameras((), 0)

    def show(self, pose: NDArray[np.float32]) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """The scene with the vehicle at `pose` [7]: place (m), attitude (w, x, y, z)."""
        self.data.qpos[:] = pose
        mujoco.mj_forward(self.model, self.data)
        return self.model, self.data

    def picture(self, pose: NDArray[np.float32], width: int, height: int) -> Image:
        """Return the picture, uint8 [height, width, 3]."""
        model, data = self.show(pose)
        return self.cameras.picture(model, data, None, width, height)

    def close(self) -> None:
        self.cameras.close()


def compile_scene(vehicle: Vehicle) -> mujoco.MjModel:
    """A floor, the edges of the box, the target, and the vehicle in its own size."""
    spec = mujoco.MjSpec()
    spec.visual.headlight.ambient = [0.4] * 3
    spec.visual.headlight.diffuse = [0.3] * 3
    spec.visual.map.znear = 0.005
    world = spec.worldbody
    world.add_light(pos=[0.5, -0.5, 3.0], dir=[-0.15, 0.15, -1.0], diffuse=[0.6] * 3)
    world.add_camera(name="front", pos=EYE, quat=looking(EYE, (0.0, 0.0, 0.0)), fovy=40)
    _stage(spec)
    body = world.add_body(name="quadrotor")
    body.add_freejoint()
    kinds = mujoco.mjtGeom
    body.add_geom(type=kinds.mjGEOM_BOX, size=[0.016, 0.013, 0.004], rgba=DARK, mass=vehicle.mass)
    top = [0, 0, 0.008]
    body.add_geom(type=kinds.mjGEOM_BOX, size=[0.015, 0.009, 0.003], pos=top, rgba=PALE, mass=0)
    for rotor, (x, y, z) in enumerate(vehicle.rotors):
        arm = body.add_geom(type=kinds.mjGEOM_CAPSULE, size=[0.0025, 0, 0], rgba=DARK, mass=0)
        arm.fromto = [0, 0, 0, x, y, z]
        motor = body.add_geom(type=kinds.mjGEOM_CYLINDER, size=[0.004, 0.008, 0], rgba=DARK, mass=0)
        motor.pos = [x, y, z + 0.003]
        disc = body.add_geom(type=kinds.mjGEOM_CYLINDER, size=[PROPELLER, 0.0008, 0], mass=0)
        disc.name = f"rotor_{rotor}"
        disc.pos = [x, y, z + 0.012]
        disc.rgba = ORANGE if x > 0 else BLUE  # the front is orange
    return spec.compile()


def _stage(spec: mujoco.MjSpec) -> None:
    world = spec.worldbody
    kinds = mujoco.mjtGeom
    spec.add_texture(
        name="sky",
        type=mujoco.mjtTexture.mjTEXTURE_SKYBOX,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_GRADIENT,
        rgb1=[0.75, 0.83, 0.92],
        rgb2=[0.93, 0.95, 0.97],
        width=128,
        height=128,
    )
    spec.add_texture(
        name="tiles",
        type=mujoco.mjtTexture.mjTEXTURE_2D,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_CHECKER,
        rgb1=[0.62, 0.66, 0.7],
        rgb2=[0.55, 0.59, 0.63],
        width=64,
        height=64,
    )
    tiles = spec.add_material(name="tiles", texrepeat=[5, 5], texuniform=True)
    tiles.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "tiles"
    world.add_geom(
        type=kinds.mjGEOM_PLANE, size=[3.0, 3.0, 0.1], pos=[0, 0, -BOX], material="tiles"
    )
    world.add_geom(type=kinds.mjGEOM_SPHERE, size=[0.008, 0, 0], rgba=[0.1, 0.65, 0.3, 1.0])
    for axis in range(3):
        for a in (-BOX, BOX):
            for b in (-BOX, BOX):
                ends = np.insert(np.array([[a, b], [a, b]]), axis, [-BOX, BOX], axis=1)
                world.add_geom(
                    type=kinds.mjGEOM_CAPSULE,
                    size=[0.0012, 0, 0],
                    fromto=ends.flatten(),
                    rgba=[0.3, 0.3, 0.35, 0.6],
                )
