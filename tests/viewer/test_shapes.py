"""Triangles of MuJoCo geoms: where they reach, what they enclose, and which way they face."""

import mujoco
import numpy as np
import pytest
from viser import ViserServer

from embodied.viewer.scene.detect import ENDLESS, MujocoScene, mesh_of, rgba_of
from embodied.viewer.scene.types import TrackedBody
from embodied.viewer.scene.viser_scene import ViserScene

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


def volume(vertices: np.ndarray, faces: np.ndarray) -> float:
    """Signed: positive where the faces run counter-clockwise seen from outside."""
    a, b, c = (vertices[faces[:, i]].astype(float) for i in range(3))
    return float((a * np.cross(b, c)).sum() / 6)


@pytest.mark.parametrize("name", VOLUMES)
def test_encloses_its_volume_facing_outwards_and_reaches_its_box(model, name) -> None:
    geom = model.geom(name).id
    vertices, faces = mesh_of(model, geom)
    # Round shapes are polygons inside the true surface: a little less, never more.
    assert 0.97 * VOLUMES[name] < volume(vertices, faces) < 1.0001 * VOLUMES[name]
    middle, half = model.geom_aabb[geom, :3], model.geom_aabb[geom, 3:]
    np.testing.assert_allclose(vertices.max(0), middle + half, atol=0.005)
    np.testing.assert_allclose(vertices.min(0), middle - half, atol=0.005)


def test_planes_face_up_and_end_somewhere(model) -> None:
    vertices, faces = mesh_of(model, model.geom("floor").id)
    assert np.abs(vertices).max(0).tolist() == [2.0, 3.0, 0.0]
    a, b, c = (vertices[faces[:, i]] for i in range(3))
    up = np.cross(b - a, c - a)[:, 2]
    assert up.max() > 0
    vertices, _ = mesh_of(model, model.geom("endless").id)
    assert np.abs(vertices).max(0).tolist() == [ENDLESS, 3.0, 0.0]


def test_a_mesh_has_its_own_corners_and_faces(model) -> None:
    """A vertex for each normal that meets in a corner, or averaged normals round the wedge."""
    vertices, faces = mesh_of(model, model.geom("wedge").id)
    assert len(faces) == 4 and len(np.unique(vertices, axis=0)) == 4
    assert faces.max() < len(vertices)


def test_colours_come_from_the_geom_or_its_material_times_the_texture(model) -> None:
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
def test_what_the_eye_follows(inside, beside, wanted) -> None:
    """A flyer alone in every direction, a walker over the ground, and of many bodies none."""
    body = f'<body>{inside}<geom size="0.1"/></body>{beside}'
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{body}</worldbody></mujoco>")
    assert MujocoScene(lambda: (model, mujoco.MjData(model))).tracked_body() == wanted


def test_the_world_moves_against_what_is_followed(server: ViserServer) -> None:
    body = '<body pos="1 2 3"><freejoint/><geom size="0.1"/></body>'
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{body}</worldbody></mujoco>")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    scene = ViserScene(server, MujocoScene(lambda: (model, data)))
    assert tuple(scene.root.position) == (0.0, 0.0, 0.0)
    scene.follow = True
    scene.show(*scene.model.poses())
    assert tuple(scene.root.position) == (-1.0, -2.0, -3.0)
