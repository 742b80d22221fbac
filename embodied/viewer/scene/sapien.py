"""SAPIEN scenes: every entity that has a render component is a body."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import sapien
from sapien import physx, render

from embodied.viewer.scene.types import Array, Mesh, Shape, TrackedBody, Viewpoint, view_of

MOVED = (physx.PhysxArticulationLinkComponent, physx.PhysxRigidDynamicComponent)
Colour = tuple[float, float, float, float]
Drawn = tuple[sapien.Entity, render.RenderBodyComponent]


class SapienScene:
    """The scene model of `scene()`, a `sapien.Scene`.

    Entities that are hidden from the scene's cameras (goals, for example) are drawn.
    """

    def __init__(self, scene: Callable[[], sapien.Scene]) -> None:
        self.scene = scene
        self._colours: dict[tuple[object, ...], Colour] = {}

    def bodies(self) -> Sequence[str]:
        return [f"{number}_{entity.name}" for number, (entity, _) in enumerate(self._drawn())]

    def poses(self) -> tuple[Array, Array]:
        system: Any = self.scene().physx_system
        if hasattr(system, "sync_poses_gpu_to_cpu"):
            system.sync_poses_gpu_to_cpu()
        poses = [entity.pose for entity, _ in self._drawn()]
        return np.stack([pose.p for pose in poses]), np.stack([pose.q for pose in poses])

    def shapes(self) -> Iterator[Shape]:
        for body, (_, drawn) in enumerate(self._drawn()):
            for number, shape in enumerate(drawn.render_shapes):
                yield from self._parts(body, number, shape)

    def viewpoint(self) -> Viewpoint:
        """That of the scene's last camera, meant for people, or one in front of everything that
        moves."""
        kind = physx.PhysxRigidBodyComponent
        every = [entity for entity, _ in self._drawn()]
        dynamic = [each for each in every if isinstance(each.find_component_by_type(kind), MOVED)]
        moving = np.stack([entity.pose.p for entity in dynamic or every])
        cameras = self.scene().get_cameras()
        if not cameras:
            return view_of(moving)
        pose = cameras[-1].get_global_pose()
        forward = pose.to_transformation_matrix()[:3, 0]
        reach = max(float(np.dot(moving.mean(0) - pose.p, forward)), 0.1)
        place = np.asarray(pose.p, np.float64)
        return Viewpoint(place, place + reach * forward, cameras[-1].fovy, moving)

    def tracked_body(self) -> TrackedBody | None:
        return None

    def _drawn(self) -> list[Drawn]:
        kind = render.RenderBodyComponent
        found = [(each, each.find_component_by_type(kind)) for each in self.scene().entities]
        return [(entity, drawn) for entity, drawn in found if isinstance(drawn, kind)]

    def _parts(self, body: int, number: int, shape: render.RenderShape) -> Iterator[Shape]:
        """One shape per part of a mesh, as parts have their own materials."""
        scale, pose = scale_of(shape), shape.local_pose
        place, turn = np.array(pose.p, np.float64), np.array(pose.q, np.float64)
        parts: Sequence[Any] = [shape]
        if isinstance(shape, render.RenderShapeTriangleMesh):
            parts = shape.parts
        for index, part in enumerate(parts):
            # As `rgba_of`, cached: reading a large texture is slow.
            texture = part.material.base_color_texture
            size = () if texture is None else (texture.filename, texture.width, texture.height)
            key = (*part.material.base_color, *size)
            if key not in self._colours:
                self._colours[key] = rgba_of(part.material)
            rgba, form = self._colours[key], zlib.crc32(part.vertices.tobytes())
            numbers = np.concatenate([scale, place, turn, rgba, [form]]).astype(np.float64)
            yield Shape(
                body=body,
                name=f"{number}_{index}",
                style=numbers.tobytes(),
                rgba=rgba,
                place=place,
                turn=turn,
                mesh=partial(mesh_of, part, scale, shape.front_face == "clockwise"),
            )


def scale_of(shape: render.RenderShape) -> Array:
    """The factors [3] that a shape's vertices are multiplied with; SAPIEN's long axis is x."""
    match shape:
        case render.RenderShapeBox():
            return np.array(shape.half_size, np.float64)
        case render.RenderShapeSphere():
            return np.full(3, shape.radius)
        case render.RenderShapeCylinder():
            return np.array([shape.half_length, shape.radius, shape.radius])
        case render.RenderShapePlane() | render.RenderShapeTriangleMesh():
            return np.array(shape.scale, np.float64)
        case _:  # a capsule has its size in its vertices
            return np.ones(3)


def mesh_of(part: Any, scale: Array, clockwise: bool = False) -> Mesh:
    """Vertices [V, 3] (m) and faces [F, 3] of one part of a shape, in the shape's frame."""
    faces = part.triangles
    if clockwise != bool(np.prod(scale) < 0):
        faces = faces[:, ::-1]
    return part.vertices * np.asarray(scale, np.float32), faces


def rgba_of(material: render.RenderMaterial) -> Colour:
    """The base colour of a material in [0, 1]; a texture counts with its mean colour."""
    r, g, b, a = (float(value) for value in material.base_color)
    texture = material.base_color_texture
    if texture is not None:
        pixels = np.asarray(texture.download(), np.float64)
        top = 255.0 if pixels.max() > 1 else 1.0
        r, g, b = (float(value) for value in pixels[..., :3].reshape(-1, 3).mean(0) / top)
    return r, g, b, a
