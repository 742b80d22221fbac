"""The page of a real environment with a real policy: what it shows, and what its controls do."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.viewer import ViewerError, serve
from embodied.viewer.export.export import replay_data
from embodied.viewer.panels.page import Viewer
from embodied.viewer.panels.plots import reward_range, thinned
from embodied.viewer.panels.task import EDGE, SIDE
from embodied.viewer.session.session import Session
from tests import toy_envs
from tests.builders import run_folder
from tests.viewer.browser import until
from tests.viewer.sessions import FLOW, LIFT, REACH, SEVERAL, alone, body, go, page_of, physics


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(tmp_path_factory.mktemp("run"), SEVERAL, FLOW, steps=(10, 20))


@pytest.fixture(scope="module")
def opened(run: Path) -> Iterator[Viewer]:
    with serve(run, port=0, block=False, seed=3) as viewer:
        yield viewer


@pytest.fixture
def viewer(opened: Viewer) -> Viewer:
    opened.pause()
    opened.set_speed(1.0)
    opened.choose("checkpoint 00000020")
    opened.set_task(None)
    opened.reset(3)
    return opened


@pytest.fixture
def idle(viewer: Viewer) -> Viewer:
    """Nobody acts but who disturbs it."""
    viewer.choose("zero")
    return viewer


def now(viewer: Viewer) -> mujoco.MjData:
    return physics(viewer.session.env, viewer.session.env.get_state())


def require_same_poses(viewer: Viewer) -> None:
    model, data = viewer.session.env.model, now(viewer)
    frames = {name.split("/")[-1].partition("_")[2]: name for name in viewer.page.scene.names}
    for each in range(1, model.nbody):
        handle = viewer.server.scene.get_handle_by_name(frames[model.body(each).name])
        np.testing.assert_allclose(handle.position, data.xpos[each], atol=2e-6)
        np.testing.assert_allclose(handle.wxyz, data.xquat[each], atol=2e-6)


def shown(viewer: Viewer) -> np.ndarray:
    viewer.refresh()
    return np.stack([frame.position for frame in viewer.page.scene.frames])


def test_frames_in_the_page_are_mujocos_poses(viewer: Viewer) -> None:
    require_same_poses(viewer)
    before = now(viewer).xpos.copy()
    viewer.choose("demonstrator")
    go(viewer, 12)
    assert np.abs(now(viewer).xpos - before).max() > 0.02
    require_same_poses(viewer)


@pytest.mark.parametrize("step", ["00000010", "00000020"])
def test_it_acts_as_the_actor_of_the_checkpoint_would(viewer: Viewer, run: Path, step: str) -> None:
    env = build(LIFT, VecEnv)
    actor = Actor(checkpoint.load_policy(run / "checkpoints" / step, env.spec), 1, execute=2)
    torch.manual_seed(5)
    obs, first = env.reset(5), torch.ones(1, dtype=torch.bool)
    wanted = []
    for _ in range(6):
        wanted.append(actor(obs, first))
        taken = env.step(wanted[-1])
        obs, first = taken.obs, taken.ended
    viewer.choose(f"checkpoint {step}")
    viewer.reset(5)
    viewer.step(6)
    assert torch.equal(torch.tensor(viewer.session.episode.actions), torch.cat(wanted))
    env.close()


def test_playing_stops_when_paused_and_at_the_end_and_goes_on_with_the_next_seed(
    idle: Viewer,
) -> None:
    session = idle.session
    idle.set_speed(5.0)
    idle.play()
    until(lambda: session.episode.steps >= 5)
    idle.pause()
    steps = session.episode.steps
    time.sleep(0.1)
    assert session.episode.steps == steps
    idle.step(session.env.horizon - steps - 2)
    idle.play()
    until(lambda: not idle.playing)
    assert session.over and session.episode.seed == 3
    idle.play()
    until(lambda: session.episode.seed == 4)
    with pytest.raises(ValueError, match=r"between 0\.1 and 5"):
        idle.set_speed(9)


def test_the_end_is_shown_before_the_next_seed_begins(idle: Viewer) -> None:
    session = idle.session
    idle.step(session.env.horizon - 1)
    before = shown(idle)
    idle.step()
    end = shown(idle)
    # The environment is at its next start already; the page shows where the last action led.
    assert np.abs(now(idle).xpos - before).max() > 0.01
    assert np.abs(end - before).max() < 1e-3
    assert idle.page.observations.text.content != session.env.describe(0)
    episode = session.episode
    assert (episode.end, episode.steps, episode.success) == ("out of time", 80, False)
    assert "out of time" in idle.page.status_text()
    idle.step()
    assert (session.episode.seed, session.episode.steps, idle.page.seed.value) == (4, 0, 4)
    idle.refresh()
    require_same_poses(idle)


def test_the_demonstrator_succeeds_and_the_page_says_so(viewer: Viewer) -> None:
    viewer.choose("demonstrator")
    episode = viewer.session.episode
    while not (episode.end and episode.success):
        viewer.step()
        episode = viewer.session.episode
        assert episode.seed < 6
    viewer.refresh()
    assert "success **yes**" in viewer.page.status.content
    assert "Policy: demonstrator" in viewer.page.status.content
    plots = viewer.page.plots
    assert plots.rewards.data[1].sum() == 1.0
    np.testing.assert_allclose(np.stack(plots.actions.data[1:], 1), episode.actions, rtol=1e-6)


def test_it_scrubs_plays_kept_moments_and_goes_on(viewer: Viewer) -> None:
    viewer.choose("demonstrator")
    viewer.step(10)
    session, slider = viewer.session, viewer.page.timeline.slider
    end = session.episode.moments[-1]
    viewer.back(3)
    places = session.episode.moments[7].frame.places
    np.testing.assert_allclose(shown(viewer), places, atol=2e-6)
    assert (slider.min, slider.max, slider.value) == (0, 10, 7)
    assert "Step **7** of 10" in viewer.page.status.content and viewer.page.onward.visible
    viewer.step(3)
    assert session.episode.moments[-1] is end and session.live
    viewer.scrub(4)
    viewer.branch()
    viewer.refresh()
    assert session.episode.steps == slider.max == 4 and not viewer.page.onward.visible


def test_task_sliders_are_native_and_reach_the_world_and_the_drawing(viewer: Viewer) -> None:
    # cube_x 0.38 to 0.62, cube_y -0.2 to 0.2, cube_half 0.018 to 0.024
    viewer.set_task([0.25, 0.75, 0.5, 1.0, 0.5])
    viewer.refresh()
    assert [slider.value for slider in viewer.page.sliders][:2] == pytest.approx([0.44, 0.1])
    cube = body(viewer.session, "cube")
    assert viewer.page.scene.frame(cube).position[:2] == pytest.approx((0.44, 0.1), abs=1e-6)

    def half() -> float:
        return float(mesh_of(viewer, "cube").vertices.max())

    assert half() == pytest.approx(0.024)
    viewer.set_task([0.25, 0.75, 0.5, 0.0, 0.5])
    assert half() == pytest.approx(0.018)
    with pytest.raises(ValueError, match="4 elements; this environment needs 5"):
        viewer.set_task([0.1] * 4)
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        viewer.set_task([2.0] * 5)
    viewer.step()
    assert viewer.session.current_task == pytest.approx([0.25, 0.75, 0.5, 0.0, 0.5])


def test_wrong_choices_name_the_right_ones(viewer: Viewer) -> None:
    with pytest.raises(ViewerError, match='did you mean "demonstrator"'):
        viewer.choose("demonstrater")
    viewer.press(lambda: viewer.choose("demonstrater"))
    viewer.refresh()
    assert "**Stopped:** unknown policy" in viewer.page.status.content


def test_a_camera_picture_is_drawn_when_asked_for(viewer: Viewer) -> None:
    page = viewer.page
    for asked in (True, False):
        page.camera.value = asked
        go(viewer)
        assert page.picture.visible is asked
    assert page.picture.image.shape == (288, 384, 3) and page.picture.image.std() > 10


def place(session: Session, name: str) -> np.ndarray:
    return session.now.frame.places[body(session, name)]


def mesh_of(viewer: Viewer, name: str) -> Any:
    number = body(viewer.session, name) if name else 0
    return next(mesh for (at, _), mesh in viewer.page.scene.meshes.items() if at == number)


def test_a_held_cube_goes_where_it_is_pulled(idle: Viewer) -> None:
    session = idle.session
    idle.step(2)
    target = place(session, "cube") + np.array([0.05, -0.08, 0.15])
    session.held = ("cube", target)
    idle.step(12)
    # It stays in the air, where the hand is, as long as it is held.
    assert np.linalg.norm(place(session, "cube") - target) < 0.02
    idle.let_go(session)
    idle.step(15)
    assert place(session, "cube")[2] < 0.05
    idle.refresh()
    assert "cube pulled, steps 2 to 13" in idle.page.status.content
    idle.reset(3)
    assert session.trial == "" and session.held is None


def test_time_goes_on_while_something_is_held(idle: Viewer) -> None:
    session = idle.session
    there = place(session, "cube") + np.array([0.0, 0.05, 0.05])
    idle.hold(session, "cube", there)
    assert idle.playing
    until(lambda: session.episode.steps >= 2)
    idle.let_go(session)
    assert not idle.playing and session.held is None
    idle.play()
    idle.hold(session, "cube", there)
    idle.let_go(session)
    assert idle.playing
    with pytest.raises(ViewerError, match="robot cannot be dragged"):
        idle.hold(session, "robot", there)


def test_a_link_moves_the_way_it_is_pushed(idle: Viewer) -> None:
    session, env = idle.session, idle.session.env
    idle.step(3)
    before = env.batch.qvel[0].copy()
    way = np.array([0.0, 1.0, 0.0])
    idle.shove(session, "hand", way, 0.5)
    change = env.batch.qvel[0] - before
    data = now(idle)
    jacobian = np.zeros((3, env.model.nv))
    mujoco.mj_jacBodyCom(env.model, data, jacobian, None, env.model.body("hand").id)
    np.testing.assert_allclose(jacobian @ change, 0.5 * way, atol=0.05)
    assert not change[9:].any() and session.trial == "hand pushed at step 3"
    with pytest.raises(ViewerError, match="cube cannot be pushed here"):
        idle.shove(session, "cube", way)


def test_the_arm_is_pushed_by_its_joints(idle: Viewer) -> None:
    session = idle.session
    assert session.pushes.names == ["cube", "robot"]
    speed = session.env.batch.qvel[0].copy()
    idle.push("robot", 2.0)
    change = session.env.batch.qvel[0] - speed
    # Seven joints and two fingers, none of the cube.
    assert np.linalg.norm(change[:9]) == pytest.approx(2.0) and not change[9:].any()
    with pytest.raises(ViewerError, match=r"table cannot be pushed here \(can: cube, robot\)"):
        idle.push("table")


def test_a_push_moves_the_cube_along_the_table(idle: Viewer) -> None:
    session = idle.session
    idle.step(2)
    before = place(session, "cube")
    idle.push("cube", 1.0)
    idle.step(3)
    moved = place(session, "cube") - before
    assert np.hypot(*moved[:2]) > 0.02 and abs(moved[2]) < 0.02
    idle.refresh()
    assert "Disturbances: cube pushed at step 2" in idle.page.status.content
    assert replay_data(session)["facts"] == "seed 3 · cube pushed at step 2"
    # The same again from the moment of the push, which is kept with it.
    idle.scrub(2)
    idle.branch()
    assert session.trial == "cube pushed at step 2"
    idle.step(3)
    np.testing.assert_allclose(place(session, "cube") - before, moved, atol=1e-9)


def test_gestures_on_meshes_reach_the_world(idle: Viewer) -> None:
    session = idle.session
    cube, hand, base = (mesh_of(idle, name)._impl for name in ("cube", "hand", ""))
    assert [len(mesh.drag_cb) for mesh in (cube, hand, base)] == [1, 0, 0]
    assert [len(mesh.click_cb) for mesh in (cube, hand, base)] == [0, 1, 0]

    def gesture(phase: str) -> None:
        ends = {"start_position": (0.0, 0.0, 0.0), "end_position": (0.0, 0.0, 0.1)}
        asyncio.run(cube.drag_cb[0].callback(SimpleNamespace(phase=phase, **ends)))

    start = place(session, "cube").copy()
    gesture("start")
    until(lambda: session.held is not None)
    np.testing.assert_allclose(session.held[1] - start, (0, 0, 0.1), atol=2e-3)
    gesture("end")
    until(lambda: session.held is None and not idle.playing)
    idle.reset(3)
    asyncio.run(hand.click_cb[0].callback(SimpleNamespace(ray_direction=(0.0, 1.0, 0.0))))
    until(lambda: "hand pushed" in session.trial)
    # A cube of another size is another mesh: it can be dragged too.
    idle.set_task([0.5, 0.5, 0.5, 1.0, 0.5])
    assert len(mesh_of(idle, "cube")._impl.drag_cb) == 1


def test_a_click_on_the_map_sets_two_elements_of_the_task(viewer: Viewer) -> None:
    panel, session = viewer.page.task.map, viewer.session

    def switch(on: bool) -> object:
        panel.switch.value = on
        viewer.press(viewer.page.changed)  # as where a user does it
        viewer.refresh()
        return viewer.server.scene.get_handle_by_name("/task_map")

    viewer.set_task([0.1, 0.2, 0.3, 0.4, 0.5])
    assert switch(True) is not None
    plane = panel.plane
    inner = (SIDE - 2 * EDGE) / SIDE
    aim = plane.middle + plane.side * inner * (0.25 * plane.right - 0.5 * plane.down)
    event = SimpleNamespace(ray_origin=aim - plane.away, ray_direction=plane.away)
    asyncio.run(panel.image._impl.click_cb[0].callback(event))
    until(lambda: session.task is not None and float(session.task[0]) > 0.5)
    assert session.task.tolist() == pytest.approx([0.75, 1.0, 0.3, 0.4, 0.5], abs=1e-6)
    until(lambda: abs(viewer.page.sliders[0].value - (0.38 + 0.75 * 0.24)) < 1e-6)
    assert switch(False) is None


def test_a_world_without_scene_or_picture_shows_its_numbers() -> None:
    with page_of(toy_envs.Reach(1)) as viewer:
        page, session = viewer.page, viewer.session
        assert page.main_view.empty and page.note.visible
        viewer.step(20)
        assert session.episode.end == "out of time"
        viewer.refresh()
        assert "No image: Reach has no camera" in page.status_text()
        x, y = session.now.next_obs["state"][0].tolist()
        assert page.observations.text.content == f"**state** [2] {x:.3g} {y:.3g}"
        seen = np.stack(page.observations.obs_plots["state"].data[1:], 1)
        # The last point is where the episode ended, not where the next one begins.
        np.testing.assert_allclose(seen[-1], (x, y), rtol=1e-6)
        assert not np.allclose(seen[-1], session.now.obs["state"][0])
        distances = -np.array(session.episode.rewards)
        np.testing.assert_allclose(np.hypot(*seen.T), distances, rtol=1e-5)


def test_an_environment_that_fails_stops_the_play_and_says_why() -> None:
    class Broken(toy_envs.Reach):
        def step(self, action):
            raise RuntimeError("the table is on fire")

    with page_of(Broken(1)) as viewer:
        with pytest.raises(RuntimeError, match="on fire"):
            viewer.step()
        viewer.play()
        until(lambda: not viewer.playing)
        assert "**Stopped:** the table is on fire" in viewer.page.status_text()


def test_a_world_that_refuses_its_scene_is_flat_and_says_why() -> None:
    class Elsewhere(toy_envs.Reach):
        def sub_scene(self, row: int) -> None:
            raise ValueError("rows are in other processes")

    pytest.importorskip("sapien", reason="SAPIEN is not installed (extra: maniskill)")
    with page_of(Elsewhere(1)) as viewer:
        assert viewer.page.scene is None
        assert "No 3D scene: rows are in other processes" in viewer.page.status_text()


def page_of_file(name: str, **settings: object) -> Viewer:
    node = yaml.safe_load(Path(f"configs/env/{name}.yaml").read_text())
    return page_of(node | {"num_envs": 1} | settings, seed=2)


@pytest.mark.parametrize("name", ["two_gap", "minigrid_doorkey"])
def test_the_picture_is_the_worlds_own_and_moves_with_it(name: str) -> None:
    with page_of_file(name) as viewer:
        stage, env = viewer.page.main_view, viewer.session.env
        assert stage.scene is None
        before = stage.screen.picture.image.copy()
        go(viewer, 9)
        assert viewer.session.episode.end == ""
        image = stage.screen.picture.image
        high, wide = image.shape[:2]
        assert np.array_equal(image, env.render(0, wide, high).numpy())
        assert not np.array_equal(image, before)
        assert viewer.page.observations.text.content.split()[:4] == env.describe(0).split()[:4]


def test_the_picture_of_an_end_stays_until_the_next_episode() -> None:
    with page_of_file("two_gap", horizon=5) as viewer:
        images = []
        for steps in (4, 1, 1):
            go(viewer, steps)
            images.append(viewer.page.main_view.screen.picture.image.copy())
        last, end, following = images
        # What the last action led to: near where it was, and not yet the next start.
        assert 0 < np.mean(end != last) < 0.2
        assert not np.array_equal(following, end)


def test_two_policies_have_a_half_of_the_page_each() -> None:
    session, session.other = alone(REACH), alone(REACH)
    session.name, session.other.name = "steered", "base"
    session.other.choose("zero")
    with Viewer(session, port=0) as viewer:
        page, half = viewer.page, viewer.page.half
        assert half is not None and half.server is not viewer.server
        go(viewer, 3)
        for view, each in zip(page.views, session.sessions, strict=True):
            places = each.now.frame.places
            assert view.scene is not None and places is not None
            np.testing.assert_allclose([f.position for f in view.scene.frames], places, atol=1e-6)
        words = re.sub("<[^>]+>", " ", half.captions.content).split()
        assert [words.count(name) for name in ("steered", "base", "running")] == [1, 1, 2]
        go(viewer, 3)  # REACH ends after 6 steps
        assert "failed" in half.captions.content or "success" in half.captions.content
        assert "Return" not in page.status_text()
        port = half.server.get_port()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "closed with the page"


class Signs(toy_envs.Counter):
    """Discrete actions with names; an image, depth and points to look at, but no camera."""

    def __init__(self) -> None:
        super().__init__(toy_envs.Config(num_envs=1))
        act = Leaf((), "int64", 0, 2, names=("left", "right", "wait"))
        obs = {
            **self.spec.obs,
            "rgb": Leaf((4, 6, 3), "uint8", 0, 255),
            "depth": Leaf((16, 16, 1), unit="m"),
            "points": Leaf((5, 6), unit="m", names=("x", "y", "z", "red", "green", "blue")),
        }
        self.spec = Spec(obs, act, dt=0.5)

    def _obs(self) -> dict[str, Tensor]:
        image = torch.full((1, 4, 6, 3), int(self.age[0]) + 10, dtype=torch.uint8)
        points = torch.full((1, 5, 6), 0.25) + self.age[0]
        shapes = {"rgb": image, "depth": torch.ones(1, 16, 16, 1), "points": points}
        return super()._obs() | shapes


def test_images_points_and_names_of_actions_are_shown() -> None:
    with page_of(Signs()) as viewer:
        page, seen = viewer.page, viewer.page.observations
        go(viewer, 2)
        # Without a camera the largest image among the observations is large in the page.
        large = page.main_view.screen.picture.image
        assert large.shape == (160, 240, 3) and set(large.ravel()) == {12}
        assert set(seen.images) == {"rgb", "depth"}
        assert set(seen.images["rgb"].image.ravel()) == {12}
        np.testing.assert_allclose(seen.clouds["points"].points, 2.25)
        assert (seen.clouds["points"].colors == 255).all()
        named = page.plots.actions.axes[1]
        assert named["values"] == ("left", "right", "wait") and named["splits"] == (0, 1, 2)
        last = int(viewer.session.episode.actions[-1][0])
        assert f"random · **{named['values'][last]}**" in page.status.content


def test_plots_stay_small_and_their_axis_holds_all() -> None:
    assert thinned(3).tolist() == [0, 1, 2]
    kept = thinned(5000)
    assert (len(kept), kept[0], kept[-1]) == (400, 0, 4999)
    assert reward_range(np.zeros(4)) == (-0.05, 1.05)
    assert reward_range(np.array([-3.0, 1.0])) == pytest.approx((-4.2, 4.2))
    assert reward_range(np.array([0.0, 5.0])) == pytest.approx((-0.4, 8.4))
