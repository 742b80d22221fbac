"""A MuJoCo scene as viser nodes: a frame for each body, its geoms below it, poses sent per frame.

/world                     moved against the followed body
/world/BODY                pose of the body (position, quaternion)
/world/BODY/GEOM           a mesh, fixed in the body
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray
from viser import FrameHandle, MeshHandle, ViserServer

from embodied.core.env import VecEnv
from embodied.viewer.shapes import mesh_of, plane_half, rgba_of

Look = Callable[[], tuple[mujoco.MjModel, mujoco.MjData]]
DRAWN_GROUPS = 3
"""Geom groups below this are drawn, as MuJoCo's own viewer does; the others are for contacts."""


def look_at(env: VecEnv) -> Look | None:
    """How to get model and data of row 0, or None where the environment is not MuJoCo.

    Our MuJoCo worlds have `scene(row)`; a Gymnasium one holds its model unwrapped.
    """
    scene = getattr(env, "scene", None)
    if scene is not None:
        return lambda: scene(0)
    first = next(iter(getattr(env, "envs", ())), None)
    inner: Any = getattr(first, "unwrapped", None)
    if isinstance(getattr(inner, "model", None), mujoco.MjModel):
        return lambda: (inner.model, inner.data)
    return None


class Scene:
    """The nodes of one scene; `show` sends what moved, `restyle` what looks different."""

    def __init__(self, server: ViserServer, look: Look) -> None:
        self.server, self.look, self.follow = server, look, False
        model, data = look()
        self.root = server.scene.add_frame("/world", show_axes=False)
        self.names = [f"/world/{_node(model.body(i).name, i)}" for i in range(model.nbody)]
        self.frames = [server.scene.add_frame(name, show_axes=False) for name in self.names]
        self.geoms: dict[int, MeshHandle] = {}
        self.styles: dict[int, bytes] = {}
        self.undrawn = 0
        self.followed = _followed(model)
        self._sent: tuple[NDArray[Any], NDArray[Any]] | None = None
        self.restyle()
        self._floor(model)
        self.show()
        self._aim(model, data)

    def restyle(self) -> None:
        """Draw the geoms whose shape, place or colour differs from what the page has."""
        model, _ = self.look()
        self.undrawn = 0
        for geom in range(model.ngeom):
            if model.geom_group[geom] >= DRAWN_GROUPS or rgba_of(model, geom)[3] == 0:
                continue
            style = _style(model, geom)
            if self.styles.get(geom) != style:
                self._draw(model, geom)
                self.styles[geom] = style
            self.undrawn += geom not in self.geoms

    def show(self) -> None:
        """Send the poses of the bodies that moved; one message each for place and turn."""
        _, data = self.look()
        places, turns = data.xpos.copy(), data.xquat.copy()
        before = self._sent
        with self.server.atomic():
            for body, frame in enumerate(self.frames):
                if before is None or np.abs(places[body] - before[0][body]).max() > 1e-6:
                    frame.position = places[body]
                if before is None or np.abs(turns[body] - before[1][body]).max() > 1e-6:
                    frame.wxyz = turns[body]
            self.root.position = self._offset(places)
        self._sent = places, turns

    def frame(self, body: int) -> FrameHandle:
        """The node of one body."""
        return self.frames[body]

    def _offset(self, places: NDArray[Any]) -> tuple[float, float, float]:
        if not self.follow or self.followed is None:
            return 0.0, 0.0, 0.0
        x, y, _ = places[self.followed]
        return -float(x), -float(y), 0.0

    def _draw(self, model: mujoco.MjModel, geom: int) -> None:
        mesh = mesh_of(model, geom)
        if mesh is None:
            return
        red, green, blue, alpha = rgba_of(model, geom)
        body = int(model.geom_bodyid[geom])
        # A node of the same name replaces the one before.
        self.geoms[geom] = self.server.scene.add_mesh_simple(
            f"{self.names[body]}/{_node(model.geom(geom).name, geom)}",
            *mesh,
            color=(round(255 * red), round(255 * green), round(255 * blue)),
            opacity=None if alpha >= 1 else alpha,
            position=model.geom_pos[geom],
            wxyz=model.geom_quat[geom],
        )

    def _floor(self, model: mujoco.MjModel) -> None:
        """Lines on planes, or nothing tells that a walker moves."""
        for geom in np.flatnonzero(model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE.value):
            x, y = plane_half(model.geom_size[geom])
            body = int(model.geom_bodyid[geom])
            self.server.scene.add_grid(
                f"{self.names[body]}/lines_{geom}",
                2 * x,
                2 * y,
                cell_thickness=0.0,
                section_color=(150, 150, 150),
                fade_distance=25.0,
                position=model.geom_pos[geom] + np.array([0.0, 0.0, 0.002]),
                wxyz=model.geom_quat[geom],
            )

    def _aim(self, model: mujoco.MjModel, data: mujoco.MjData) -> None:
        """Look from the scene's first camera, or from in front of all that moves."""
        camera = self.server.initial_camera
        moving = data.xpos[1:] if model.nbody > 1 else data.xpos
        middle = moving.mean(0)
        if model.ncam:
            place, forward = data.cam_xpos[0], -data.cam_xmat[0].reshape(3, 3)[:, 2]
            reach = max(float(np.dot(middle - place, forward)), 0.1)
            target = place + reach * forward
            # A little back, as the panel takes part of the window.
            camera.position, camera.look_at = target - 1.25 * reach * forward, target
            camera.fov = float(np.radians(model.cam_fovy[0]))
            return
        size = max(float(np.linalg.norm(moving - middle, axis=1).max()), 0.5)
        camera.position = middle + size * np.array([2.0, -2.5, 1.2])
        camera.look_at = middle


def _node(name: str, index: int) -> str:
    """A node name for a body or geom: unique, and without the path's own separator."""
    return f"{index}_{name.replace('/', '.')}" if name else str(index)


def _followed(model: mujoco.MjModel) -> int | None:
    """The body that the model's first camera tracks, where it does."""
    tracking = (
        mujoco.mjtCamLight.mjCAMLIGHT_TRACK.value,
        mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM.value,
    )
    if model.ncam and model.cam_mode[0] in tracking and model.cam_bodyid[0] > 0:
        return int(model.cam_bodyid[0])
    return None


def _style(model: mujoco.MjModel, geom: int) -> bytes:
    """Everything about a geom that the page would have to draw anew."""
    fields = (model.geom_size, model.geom_pos, model.geom_quat)
    numbers = [*(field[geom] for field in fields), np.array(rgba_of(model, geom))]
    return np.concatenate(numbers).tobytes()
