"""SAPIEN scenes in the page: shapes, colours and poses are those of the scene."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from viser import ViserServer

from embodied.viewer.scene.viser_scene import ViserScene
from tests.viewer.sessions import go, page_of
from tests.viewer.test_scene import volume

pytest.importorskip("mani_skill", reason="ManiSkill is not installed (extra: maniskill)")

# It chooses the Vulkan driver, which counts only before SAPIEN draws.
from embodied.envs.maniskill.factory import NoDriver, require_driver

try:
    require_driver("cpu")
except NoDriver as absent:
    pytest.skip(str(absent), allow_module_level=True)

import sapien

HALF = 0.5**0.5


@pytest.fixture(scope="module")
def scene() -> Iterator[object]:
    """A kinematic body of four shapes, a red one that falls, and the ground."""
    pictures = sapien.render.RenderSystem(sapien.Device("cpu"))
    made = sapien.Scene([sapien.physx.PhysxCpuSystem(), pictures])
    orange = sapien.render.RenderMaterial(base_color=[1, 0.5, 0.25, 1])
    body = made.create_actor_builder()
    body.add_box_visual(sapien.Pose([0.1, 0, 0]), [0.1, 0.2, 0.3], orange)
    body.add_sphere_visual(radius=0.5, material=orange)
    body.add_capsule_visual(sapien.Pose(q=[HALF, 0, -HALF, 0]), 0.1, 0.4, orange)
    body.add_cylinder_visual(radius=0.1, half_length=0.4, material=orange)
    body.set_initial_pose(sapien.Pose([0, 0, 1]))
    body.build_kinematic(name="four/shapes")
    falling = made.create_actor_builder()
    falling.add_box_collision(half_size=[0.1, 0.1, 0.1])
    falling.add_box_visual(half_size=[0.1, 0.1, 0.1], material=[1, 0, 0])
    falling.set_initial_pose(sapien.Pose([2, 0, 3]))
    falling.build(name="falling")
    made.add_ground(0)
    yield made


@pytest.fixture
def look(scene):
    from embodied.viewer.scene.sapien import SapienScene

    return SapienScene(lambda: scene)


def test_shapes_enclose_their_volumes_facing_outwards(look) -> None:
    can = np.pi * 0.1**2 * 0.8
    ball = 4 / 3 * np.pi
    wanted = np.array([8 * 0.1 * 0.2 * 0.3, ball * 0.5**3, can + ball * 0.1**3, can])
    shapes = [shape for shape in look.shapes() if shape.body == 0]
    share = np.array([volume(*shape.mesh()) for shape in shapes]) / wanted
    assert ((share > 0.97) & (share < 1.0001)).all()


def test_a_mirrored_mesh_still_faces_outwards(look) -> None:
    from embodied.viewer.scene.sapien import mesh_of

    kind = sapien.render.RenderBodyComponent
    part = next(iter(look.scene().entities)).find_component_by_type(kind).render_shapes[0]
    assert volume(*mesh_of(part, np.array([-1.0, 1.0, 1.0]))) == pytest.approx(8.0)
    assert volume(*mesh_of(part, np.ones(3), clockwise=True)) == pytest.approx(-8.0)


def test_frames_in_the_page_follow_the_scene(scene, look, server: ViserServer) -> None:
    drawn = ViserScene(server, look)
    assert [name.partition("_")[2] for name in drawn.bodies] == [
        "four/shapes", "falling", "ground",
    ]  # fmt: skip
    assert drawn.names[0] == "/world/0_four.shapes"
    assert len(drawn.meshes) == 6 and drawn.undrawn == 0
    before = [np.array(frame.position) for frame in drawn.frames]
    np.testing.assert_allclose(before[1], (2, 0, 3), atol=1e-6)
    for _ in range(20):
        scene.step()
    drawn.show(*look.poses())
    np.testing.assert_allclose(drawn.frames[1].position, scene.entities[1].pose.p, atol=1e-6)
    assert drawn.frames[1].position[2] < 2.99
    assert (np.array(drawn.frames[0].position) == before[0]).all()


def test_what_goes_and_comes_is_removed_and_drawn(scene, look, server: ViserServer) -> None:
    drawn = ViserScene(server, look)
    kept = drawn.meshes[0, "0_0"]
    drawn.restyle()
    assert drawn.meshes[0, "0_0"] is kept
    newcomer = scene.create_actor_builder()
    newcomer.add_sphere_visual(radius=0.1)
    newcomer.set_initial_pose(sapien.Pose([0, 1, 0]))
    entity = newcomer.build_kinematic(name="newcomer")
    drawn.restyle()
    drawn.show(*look.poses())
    assert len(drawn.frames) == 4 and len(drawn.meshes) == 7
    np.testing.assert_allclose(drawn.frames[3].position, (0, 1, 0), atol=1e-6)
    gone = drawn.names[3]
    scene.remove_entity(entity)
    drawn.restyle()
    assert len(drawn.meshes) == 6 and server.scene.get_handle_by_name(gone) is None


def test_a_maniskill_world_is_drawn_where_it_is() -> None:
    node = yaml.safe_load(Path("configs/env/maniskill_pick_cube.yaml").read_text())
    with page_of(node | {"num_envs": 1, "backend": "cpu"}, seed=4) as viewer:
        drawn, session = viewer.page.scene, viewer.session
        cube = next(i for i, name in enumerate(drawn.bodies) if name.endswith("cube"))
        assert [key for key in drawn.meshes if key[0] == cube] == [(cube, "0_0")]
        half = np.abs(drawn.meshes[cube, "0_0"].vertices).max(0)
        np.testing.assert_allclose(half, 0.02, atol=1e-6)
        go(viewer, 3)
        places = {each.name: each.pose.p for each in session.env.sub_scene(0).entities}
        for name, frame in zip(drawn.bodies, drawn.frames, strict=True):
            np.testing.assert_allclose(frame.position, places[name.partition("_")[2]], atol=1e-6)
        seen = np.array(drawn.frames[cube].position)
        viewer.reset(5)
        viewer.refresh()
        assert np.abs(seen - drawn.frames[cube].position).max() > 0.001
        assert session.recorder.no_scene_reason == ""
