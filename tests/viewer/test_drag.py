"""Hands in the world: a thing is dragged or pushed, what is seen is late or missing, a click on the
map is a task: what was asked for happens, and is said."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import mujoco
import numpy as np
import pytest
import torch

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.viewer import ViewerError
from embodied.viewer.export.export import replay_data
from embodied.viewer.panels.page import Viewer
from embodied.viewer.panels.task import EDGE, SIDE, MapAxis, MapPlane, map_picture, task_at
from embodied.viewer.scene.types import Viewpoint
from embodied.viewer.session.disturbances import Pushes
from embodied.viewer.session.session import Session
from tests import toy_envs
from tests.viewer.browser import until
from tests.viewer.sessions import HOPPER, LIFT, alone


@pytest.fixture(scope="module")
def opened() -> Iterator[Viewer]:
    with Viewer(alone(build(LIFT, VecEnv)), port=0) as viewer:
        viewer.choose("zero")
        yield viewer


@pytest.fixture
def viewer(opened: Viewer) -> Viewer:
    opened.pause()
    opened.set_task(None)
    opened.reset(3)
    return opened


def body(session: Session, name: str) -> int:
    names = session.recorder.scene.bodies()
    return next(i for i, each in enumerate(names) if each.partition("_")[2] == name)


def place(session: Session, name: str) -> np.ndarray:
    return session.now.frame.places[body(session, name)]


def test_a_held_cube_goes_where_it_is_pulled(viewer: Viewer) -> None:
    session = viewer.session
    viewer.step(2)
    target = place(session, "cube") + np.array([0.05, -0.08, 0.15])
    session.held = ("cube", target)
    viewer.step(12)
    # It stays in the air, where the hand is, as long as it is held.
    assert np.linalg.norm(place(session, "cube") - target) < 0.02
    viewer.let_go(session)
    viewer.step(15)
    assert place(session, "cube")[2] < 0.05
    viewer.refresh()
    assert "cube pulled, steps 2 to 13" in viewer.page.status.content
    viewer.reset(3)
    assert session.trial == "" and session.held is None


def test_time_goes_on_while_something_is_held(viewer: Viewer) -> None:
    session = viewer.session
    there = place(session, "cube") + np.array([0.0, 0.05, 0.05])
    viewer.hold(session, "cube", there)
    assert viewer.playing
    until(lambda: session.episode.steps >= 2)
    viewer.let_go(session)
    assert not viewer.playing and session.held is None
    viewer.play()
    viewer.hold(session, "cube", there)
    viewer.let_go(session)
    assert viewer.playing
    with pytest.raises(ViewerError, match="robot cannot be dragged"):
        viewer.hold(session, "robot", there)


def test_a_link_moves_the_way_it_is_pushed(viewer: Viewer) -> None:
    session = viewer.session
    env = session.env
    viewer.step(3)
    before = env.batch.qvel[0].copy()
    way = np.array([0.0, 1.0, 0.0])
    viewer.shove(session, "hand", way, 0.5)
    change = env.batch.qvel[0] - before
    data = mujoco.MjData(env.model)
    data.qpos[:], data.qvel[:] = env.batch.qpos[0], change
    mujoco.mj_forward(env.model, data)
    jacobian = np.zeros((3, env.model.nv))
    mujoco.mj_jacBodyCom(env.model, data, jacobian, None, env.model.body("hand").id)
    np.testing.assert_allclose(jacobian @ change, 0.5 * way, atol=0.05)
    assert not change[9:].any()
    assert session.trial == "hand pushed at step 3"
    with pytest.raises(ViewerError, match="cube cannot be pushed here"):
        viewer.shove(session, "cube", way)


def test_gestures_on_meshes_reach_the_world(viewer: Viewer) -> None:
    session, scene = viewer.session, viewer.page.scene
    cube = next(mesh for (at, _), mesh in scene.meshes.items() if at == body(session, "cube"))
    hand = next(mesh for (at, _), mesh in scene.meshes.items() if at == body(session, "hand"))
    base = next(mesh for (at, _), mesh in scene.meshes.items() if at == 0)
    assert [len(mesh._impl.drag_cb) for mesh in (cube, hand, base)] == [1, 0, 0]
    assert [len(mesh._impl.click_cb) for mesh in (cube, hand, base)] == [0, 1, 0]

    def gesture(phase: str, way: tuple[float, float, float]) -> None:
        event = SimpleNamespace(phase=phase, start_position=(0.0, 0.0, 0.0), end_position=way)
        asyncio.run(cube._impl.drag_cb[0].callback(event))

    start = place(session, "cube").copy()
    gesture("start", (0.0, 0.0, 0.1))
    until(lambda: session.held is not None)
    np.testing.assert_allclose(session.held[1] - start, (0, 0, 0.1), atol=2e-3)
    gesture("end", (0.0, 0.0, 0.1))
    until(lambda: session.held is None and not viewer.playing)
    viewer.reset(3)
    click = SimpleNamespace(ray_direction=(0.0, 1.0, 0.0))
    asyncio.run(hand._impl.click_cb[0].callback(click))
    until(lambda: "hand pushed" in session.trial)
    # A cube of another size is another mesh: it can be dragged too.
    viewer.set_task([0.5, 0.5, 0.5, 1.0, 0.5])
    again = next(mesh for (at, _), mesh in scene.meshes.items() if at == body(session, "cube"))
    assert len(again._impl.drag_cb) == 1


def test_a_ray_meets_the_map_where_it_points() -> None:
    eye = Viewpoint(np.array([0.0, -2.0, 0.0]), np.zeros(3))
    board = MapPlane.beside(eye)
    # Half way, 1 m from the eye: a fifth of that large, 13 cm to the left and 14 cm below.
    assert board.side == pytest.approx(0.2)
    np.testing.assert_allclose(board.middle, (-0.13, -1, -0.14), atol=1e-9)
    point = board.middle + 0.05 * board.right + 0.02 * board.down
    np.testing.assert_allclose(point, (-0.08, -1, -0.16), atol=1e-9)
    hit = board.hit(eye.place, point - eye.place)
    assert hit == pytest.approx((0.75, 0.6))
    assert board.hit(eye.place, np.array([1.0, 0.0, 0.0])) is None
    turned = np.zeros(3)
    mujoco.mju_rotVecQuat(turned, np.array([0.0, 1.0, 0.0]), board.turn)
    np.testing.assert_allclose(turned, (0, 0, -1), atol=1e-9)


def test_the_map_shows_and_means_the_same_place() -> None:
    x, y = MapAxis(2, "x"), MapAxis(0, "y")
    picture = map_picture(x, y, [0.25, 0.0, 0.75], None)
    orange = np.argwhere((picture == (213, 94, 0)).all(-1))
    top, left = orange.mean(0) + 0.5
    assert task_at(left / SIDE, top / SIDE) == pytest.approx((0.75, 0.25), abs=0.01)
    assert task_at(EDGE / SIDE, EDGE / SIDE) == (0.0, 1.0)
    assert task_at(0.01, 0.5) is None
    sampled = map_picture(x, y, None, np.full((5, 3), 0.9))
    blue = np.argwhere((sampled[..., 0] < 60) & (sampled[..., 2] > 150))
    up, across = blue.mean(0)
    assert across > 0.7 * SIDE and up < 0.3 * SIDE


def test_a_click_on_the_map_sets_two_elements_of_the_task(viewer: Viewer) -> None:
    panel = viewer.page.task.map
    viewer.set_task([0.1, 0.2, 0.3, 0.4, 0.5])
    panel.switch.value = True
    viewer.press(viewer.page.changed)  # as where a user does it
    viewer.refresh()
    assert viewer.server.scene.get_handle_by_name("/task_map") is not None
    plane = panel.plane
    inner = (SIDE - 2 * EDGE) / SIDE
    aim = plane.middle + plane.side * inner * (0.25 * plane.right - 0.5 * plane.down)
    event = SimpleNamespace(ray_origin=aim - plane.away, ray_direction=plane.away)
    asyncio.run(panel.image._impl.click_cb[0].callback(event))
    until(lambda: viewer.session.task is not None and float(viewer.session.task[0]) > 0.5)
    assert viewer.session.task.tolist() == pytest.approx([0.75, 1.0, 0.3, 0.4, 0.5], abs=1e-6)
    until(lambda: abs(viewer.page.sliders[0].value - (0.38 + 0.75 * 0.24)) < 1e-6)
    panel.switch.value = False
    viewer.press(viewer.page.changed)  # as where a user does it
    viewer.refresh()
    assert viewer.server.scene.get_handle_by_name("/task_map") is None
    viewer.set_task(None)


def test_a_push_moves_the_cube_along_the_table(viewer: Viewer) -> None:
    viewer.step(2)
    before = place(viewer.session, "cube")
    viewer.push("cube", 1.0)
    viewer.step(3)
    moved = place(viewer.session, "cube") - before
    assert np.hypot(*moved[:2]) > 0.02 and abs(moved[2]) < 0.02
    viewer.refresh()
    assert "Disturbances: cube pushed at step 2" in viewer.page.status.content
    assert replay_data(viewer.session)["facts"] == "seed 3 · cube pushed at step 2"
    # The same again from the moment of the push, which is kept with it.
    viewer.scrub(2)
    viewer.branch()
    viewer.step(3)
    np.testing.assert_allclose(place(viewer.session, "cube") - before, moved, atol=1e-9)
    viewer.reset(3)
    assert viewer.session.trial == ""


def test_the_arm_is_pushed_by_its_joints(viewer: Viewer) -> None:
    assert viewer.session.pushes.names == ["cube", "robot"]
    speed = viewer.session.env.batch.qvel[0].copy()
    viewer.push("robot", 2.0)
    change = viewer.session.env.batch.qvel[0] - speed
    # Seven joints and two fingers, none of the cube.
    assert np.linalg.norm(change[:9]) == pytest.approx(2.0) and not change[9:].any()
    with pytest.raises(ViewerError, match=r"table cannot be pushed here \(can: cube, robot\)"):
        viewer.push("table")


def test_gymnasiums_worlds_can_be_pushed_others_not() -> None:
    hopper = build(HOPPER, VecEnv)
    hopper.reset(0)
    pushes = Pushes(hopper)
    assert pushes.names == ["robot"] and pushes.links() == ["torso", "thigh", "leg", "foot"]
    inner = hopper.envs[0].unwrapped.data
    before = inner.qvel.copy()
    pushes.push("robot", 3.0, 1)
    assert np.linalg.norm(inner.qvel - before) == pytest.approx(3.0)
    hopper.close()
    other = Pushes(toy_envs.Reach(1))
    assert other.names == other.links() == []


def test_delay_and_darkness_reach_who_acts_and_nobody_else() -> None:
    seen: list[torch.Tensor] = []

    def act(obs, first):
        seen.append(obs["state"].clone())
        return torch.full((1, 2), 0.5)

    act.explore = False
    session = Session(toy_envs.Reach(1), {"watched": lambda: act}, "watched")
    session.reset(1)
    session.disturbance.late = 2
    for _ in range(5):
        session.advance()
    shown = [moment.obs["state"] for moment in session.episode.moments]
    for given, at in zip(seen, [0, 0, 0, 1, 2], strict=True):
        assert torch.equal(given, shown[at])
    session.disturbance.late, session.disturbance.off = 0, {"state"}
    session.advance()
    assert not seen[-1].any() and session.now.next_obs["state"].any()
    assert session.trial == "state is off"
    session.close()
