"""What is drawn: MuJoCo geoms, lighter meshes, pictures, clouds, the view, the map."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from trimesh import creation
from viser import ViserServer

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.spec import Leaf
from embodied.viewer.panels.task import EDGE, SIDE, MapAxis, MapPlane, map_picture, task_at
from embodied.viewer.scene.detect import ENDLESS, MujocoScene, detect_scene, mesh_of, rgba_of
from embodied.viewer.scene.types import (
    TrackedBody,
    Viewpoint,
    cloud_of,
    is_picture,
    lighter,
    picture_of,
)
from embodied.viewer.scene.viser_scene import ViserScene, fitted, tangent
from tests.viewer.sessions import REACH

SCENE = """
<mujoco>
  <asset>
    <mesh name="wedge" vertex="0 0 0  0.2 0 0  0 0.3 0  0 0 0.4"/>
    <texture name="half" type="2d" builtin="flat" rgb1="1 0.5 0" width="4" height="4"/>
    <material name="painted" texture="half" rgba="0.5 1 1 0.25"/>
  </asset>
  <worldbody>
    <geom name="box" type="box" size="0.1 0.2 0.3" rgba="1 0 0 1"/>
    <geom name="ball" type="sphere" size="0.5"/>
    <geom name="egg" type="ellipsoid" size="0.1 0.2 0.3"/>
    <geom name="pill" type="capsule" size="0.1 0.4"/>
    <geom name="can" type="cylinder" size="0.1 0.4"/>
    <geom name="wedge" type="mesh" mesh="wedge"/>
    <geom name="floor" type="plane" size="2 3 0.1"/>
    <geom name="endless" type="plane" size="0 3 0.1" material="painted"/>
  </worldbody>
</mujoco>
"""
VOLUMES = {
    "box": 8 * 0.1 * 0.2 * 0.3,
    "ball": 4 / 3 * np.pi * 0.5**3,
    "egg": 4 / 3 * np.pi * 0.1 * 0.2 * 0.3,
    "pill": np.pi * 0.1**2 * 0.8 + 4 / 3 * np.pi * 0.1**3,
    "can": np.pi * 0.1**2 * 0.8,
    "wedge": 0.2 * 0.3 * 0.4 / 6,
}


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(SCENE)


def world(inside: str) -> MujocoScene:
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{inside}</worldbody></mujoco>")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return MujocoScene(lambda: (model, data))


def volume(vertices: np.ndarray, faces: np.ndarray) -> float:
    """Signed: positive where the faces run counter-clockwise seen from outside."""
    a, b, c = (vertices[faces[:, i]].astype(float) for i in range(3))
    return float((a * np.cross(b, c)).sum() / 6)


@pytest.mark.parametrize("name", VOLUMES)
def test_encloses_its_volume_facing_outwards_and_reaches_its_box(
    model: mujoco.MjModel, name: str
) -> None:
    geom = model.geom(name).id
    vertices, faces = mesh_of(model, geom)
    # Round shapes are polygons inside the true surface: a little less, never more.
    assert 0.97 * VOLUMES[name] < volume(vertices, faces) < 1.0001 * VOLUMES[name]
    middle, half = model.geom_aabb[geom, :3], model.geom_aabb[geom, 3:]
    ends = np.stack([vertices.min(0), vertices.max(0)])
    np.testing.assert_allclose(ends, [middle - half, middle + half], atol=0.005)


def test_planes_face_up_and_end_somewhere(model: mujoco.MjModel) -> None:
    vertices, faces = mesh_of(model, model.geom("floor").id)
    assert np.abs(vertices).max(0).tolist() == [2.0, 3.0, 0.0]
    a, b, c = (vertices[faces[:, i]] for i in range(3))
    assert np.cross(b - a, c - a)[:, 2].max() > 0
    vertices, _ = mesh_of(model, model.geom("endless").id)
    assert np.abs(vertices).max(0).tolist() == [ENDLESS, 3.0, 0.0]


def test_a_mesh_has_its_own_corners_and_faces(model: mujoco.MjModel) -> None:
    """A vertex for each normal that meets in a corner, or averaged normals round the wedge."""
    vertices, faces = mesh_of(model, model.geom("wedge").id)
    assert len(faces) == 4 and len(np.unique(vertices, axis=0)) == 4
    assert faces.max() < len(vertices)


def test_colours_come_from_the_geom_or_its_material_times_the_texture(
    model: mujoco.MjModel,
) -> None:
    assert rgba_of(model, model.geom("box").id) == (1.0, 0.0, 0.0, 1.0)
    painted = rgba_of(model, model.geom("endless").id)
    np.testing.assert_allclose(painted, (0.5, 0.5, 0.0, 0.25), atol=0.01)


@pytest.mark.parametrize(
    ("inside", "beside", "wanted"),
    [
        ("<freejoint/>", "", TrackedBody(1, (1.0, 1.0, 1.0))),
        ("<freejoint/>", '<body><joint/><geom size="0.1"/></body>', None),
        ("<joint/>", "", None),
        ('<joint/><camera mode="trackcom"/>', "", TrackedBody(1, (1.0, 1.0, 0.0))),
        ('<freejoint/><camera mode="fixed"/>', "", TrackedBody(1, (1.0, 1.0, 1.0))),
    ],
)
def test_what_the_eye_follows(inside: str, beside: str, wanted: TrackedBody | None) -> None:
    """A flyer alone in every direction, a walker over the ground, and of many bodies none."""
    assert world(f'<body>{inside}<geom size="0.1"/></body>{beside}').tracked_body() == wanted


def test_the_world_moves_against_what_is_followed(server: ViserServer) -> None:
    body = '<body pos="1 2 3"><freejoint/><geom size="0.1"/></body>'
    scene = ViserScene(server, world(body))
    assert tuple(scene.root.position) == (0.0, 0.0, 0.0)
    scene.follow = True
    scene.show(*scene.model.poses())
    assert tuple(scene.root.position) == (-1.0, -2.0, -3.0)


def test_meshes_get_lighter_and_keep_their_form() -> None:
    ball = creation.uv_sphere(0.1, (18, 32))
    light, triangles = lighter((ball.vertices, ball.faces), 20)
    assert len(ball.faces) > 600 and 100 < len(triangles) < 0.8 * len(ball.faces)
    assert np.abs(np.linalg.norm(light, axis=1) - 0.1).max() < 0.004
    # 4/3 pi r^3, and a polyhedron inside is a little smaller: faces look outwards.
    assert 0.9 < volume(light, triangles) / (4 / 3 * np.pi * 1e-3) < 1.0
    box = creation.box()
    assert len(lighter((box.vertices, box.faces))[1]) == 12


def test_pictures_of_images_stacks_and_depth() -> None:
    pixel = torch.arange(6, dtype=torch.uint8).expand(2, 2, 6)
    stacked = picture_of(pixel, Leaf((2, 2, 6), "uint8", 0, 255))
    assert stacked.shape == (160, 160, 3) and stacked[0, 0].tolist() == [3, 4, 5]
    grey = picture_of(pixel[..., :1] + 9, Leaf((2, 2, 1), "uint8", 0, 255))
    assert grey[0, 0].tolist() == [9, 9, 9]
    depth = torch.full((16, 16, 1), 3.0)
    depth[0, 0], depth[15, 15], depth[7, 7] = 1.0, 5.0, float("inf")
    leaf = Leaf((16, 16, 1), unit="m")
    shown = picture_of(depth, leaf)
    # From 0 (what is not finite) to 5 m: 255 * 3 / 5 = 153.
    assert (shown[50, 10, 0], shown[-1, -1, 0], shown[75, 75, 0]) == (153, 255, 0)
    leaves = leaf, Leaf((16, 3)), Leaf((7, 7, 3), "uint8", 0, 10, unit="symbol")
    assert [is_picture(each) for each in leaves] == [True, False, False]


def test_clouds_have_the_colours_of_their_columns() -> None:
    row = torch.tensor([[1.0, 2.0, 3.0, 1.0, 0.5, -1.0]])
    places, colours = cloud_of(row)
    assert places.tolist() == [[1.0, 2.0, 3.0]] and colours.tolist() == [[255, 128, 0]]
    assert cloud_of(row[:, :3])[1].shape == (1, 3)


def projected(eye: Viewpoint, aspect: float, point: NDArray[Any]) -> tuple[float, float]:
    """Where a point is in a window: right and up, from -1 to 1."""
    ahead = (eye.target - eye.place) / np.linalg.norm(eye.target - eye.place)
    right = np.cross(ahead, (0.0, 0.0, 1.0))
    right /= np.linalg.norm(right)
    seen = point - eye.place
    scale = float(seen @ ahead) * tangent(eye.fov)
    return float(seen @ right) / scale / aspect, float(seen @ np.cross(right, ahead)) / scale


@pytest.mark.parametrize(
    ("aspect", "covered"), [(1.6, 0.0), (0.56, 0.0), (0.5, 0.45), (0.25, 0.45)]
)
def test_what_moves_fills_a_window_of_any_shape(aspect: float, covered: float) -> None:
    env = build(REACH, VecEnv)
    model = detect_scene(env)
    assert model is not None
    eye = model.viewpoint()
    assert eye.seen is not None
    seen = fitted(eye, aspect, covered)
    x, y = np.transpose([projected(seen, aspect, place) for place in eye.seen])
    bottom = 2 * covered - 1
    assert np.abs(x).max() < 0.95 and y.max() < 0.97 and y.min() > bottom
    assert max(np.ptp(x), np.ptp(y) / (1 - covered)) > 0.9, "half the picture would be floor"
    ahead = seen.target - seen.place
    np.testing.assert_allclose(np.cross(ahead, eye.target - eye.place), 0, atol=1e-9)
    # Without places to see, as much as the camera of the model shows, and not nearer.
    far = fitted(replace(eye, seen=None), aspect, covered)
    closer = np.linalg.norm(far.place - far.target) / np.linalg.norm(eye.place - eye.target)
    assert closer == pytest.approx(max(1.0, 0.9 / aspect, 1 / (1 - covered)))
    env.close()


def test_a_ray_meets_the_map_where_it_points() -> None:
    eye = Viewpoint(np.array([0.0, -2.0, 0.0]), np.zeros(3))
    board = MapPlane.beside(eye)
    # Half way, 1 m from the eye: a fifth of that large, 13 cm to the left and 14 cm below.
    assert board.side == pytest.approx(0.2)
    np.testing.assert_allclose(board.middle, (-0.13, -1, -0.14), atol=1e-9)
    point = board.middle + 0.05 * board.right + 0.02 * board.down
    np.testing.assert_allclose(point, (-0.08, -1, -0.16), atol=1e-9)
    assert board.hit(eye.place, point - eye.place) == pytest.approx((0.75, 0.6))
    assert board.hit(eye.place, np.array([1.0, 0.0, 0.0])) is None
    turned = np.zeros(3)
    mujoco.mju_rotVecQuat(turned, np.array([0.0, 1.0, 0.0]), board.turn)
    np.testing.assert_allclose(turned, (0, 0, -1), atol=1e-9)


def test_the_map_shows_and_means_the_same_place() -> None:
    x, y = MapAxis(2, "x"), MapAxis(0, "y")
    picture = map_picture(x, y, [0.25, 0.0, 0.75], None)
    top, left = np.argwhere((picture == (213, 94, 0)).all(-1)).mean(0) + 0.5
    assert task_at(left / SIDE, top / SIDE) == pytest.approx((0.75, 0.25), abs=0.01)
    assert task_at(EDGE / SIDE, EDGE / SIDE) == (0.0, 1.0)
    assert task_at(0.01, 0.5) is None
    sampled = map_picture(x, y, None, np.full((5, 3), 0.9))
    up, across = np.argwhere((sampled[..., 0] < 60) & (sampled[..., 2] > 150)).mean(0)
    assert across > 0.7 * SIDE and up < 0.3 * SIDE
