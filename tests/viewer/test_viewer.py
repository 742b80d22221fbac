"""The viewer on a real environment with a real policy, driven as a caller and as a browser."""

from __future__ import annotations

import importlib.metadata
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import mujoco
import numpy as np
import pytest
import torch
import zstandard
from viser._messages import GuiUpdateMessage, Message, ShareUrlRequest, ViewerCameraMessage
from websockets.sync.client import connect

from embodied.core import checkpoint
from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.viewer import ViewerError, serve
from embodied.viewer.panels.page import Viewer
from embodied.viewer.panels.plots import reward_range, thinned
from tests import toy_envs
from tests.builders import run_folder, wait_until
from tests.viewer.sessions import FLOW, LIFT, SEVERAL, alone


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return run_folder(tmp_path_factory.mktemp("run"), SEVERAL, FLOW, steps=(10, 20))


@pytest.fixture(scope="module")
def opened(run: Path) -> Iterator[Viewer]:
    viewer = serve(run, port=0, block=False, seed=3)
    yield viewer
    viewer.close()


@pytest.fixture
def viewer(opened: Viewer) -> Viewer:
    opened.pause()
    opened.choose("checkpoint 00000020")
    opened.set_task(None)
    opened.reset(3)
    return opened


def physics(viewer: Viewer) -> mujoco.MjData:
    """Row 0 as MuJoCo has it, from the saved state alone."""
    env = viewer.session.env
    data = mujoco.MjData(env.model)
    state = env.get_state()["physics"][0].numpy()
    mujoco.mj_setState(env.model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION.value)
    mujoco.mj_forward(env.model, data)
    return data


def require_same_poses(viewer: Viewer) -> None:
    model, data = viewer.session.env.model, physics(viewer)
    frames = {name.split("/")[-1].partition("_")[2]: name for name in viewer.page.scene.names}
    for body in range(1, model.nbody):
        handle = viewer.server.scene.get_handle_by_name(frames[model.body(body).name])
        np.testing.assert_allclose(handle.position, data.xpos[body], atol=2e-6)
        np.testing.assert_allclose(handle.wxyz, data.xquat[body], atol=2e-6)


def test_frames_in_the_page_are_mujocos_poses(viewer: Viewer) -> None:
    require_same_poses(viewer)
    before = physics(viewer).xpos.copy()
    viewer.choose("demonstrator")
    viewer.step(12)
    viewer.refresh()
    assert np.abs(physics(viewer).xpos - before).max() > 0.02
    require_same_poses(viewer)


def test_the_same_seed_and_policy_give_the_same_episode(viewer: Viewer) -> None:
    states = []
    for _ in range(2):
        viewer.reset(7)
        viewer.step(5)
        states.append(viewer.session.env.get_state()["physics"])
    assert torch.equal(states[0], states[1])
    viewer.choose("checkpoint 00000010")
    viewer.reset(7)
    viewer.step(5)
    assert not torch.equal(states[0], viewer.session.env.get_state()["physics"])


def test_it_acts_as_the_actor_of_the_checkpoint_would(viewer: Viewer, run: Path) -> None:
    from embodied.core.actor import Actor

    env = build(LIFT, VecEnv)
    actor = Actor(checkpoint.load_policy(run, env.spec), 1, execute=2)
    torch.manual_seed(5)
    obs, first = env.reset(5), torch.ones(1, dtype=torch.bool)
    wanted = []
    for _ in range(6):
        wanted.append(actor(obs, first))
        step = env.step(wanted[-1])
        obs, first = step.obs, step.ended
    viewer.reset(5)
    viewer.step(6)
    assert torch.equal(torch.tensor(viewer.session.episode.actions), torch.cat(wanted))
    env.close()


def test_playing_goes_on_and_pausing_stops(viewer: Viewer) -> None:
    viewer.set_speed(5.0)
    viewer.play()
    wait_until(lambda: viewer.session.episode.steps >= 5)
    viewer.pause()
    steps = viewer.session.episode.steps
    time.sleep(0.1)
    assert viewer.session.episode.steps == steps
    viewer.set_speed(1.0)
    with pytest.raises(ValueError, match=r"between 0\.1 and 5"):
        viewer.set_speed(9)


def test_playing_stops_at_the_end_and_goes_on_with_the_next_seed(viewer: Viewer) -> None:
    viewer.choose("zero")
    viewer.step(viewer.session.env.horizon - 2)
    seed = viewer.session.episode.seed
    viewer.play()
    wait_until(lambda: not viewer.playing)
    assert viewer.session.over and viewer.session.episode.seed == seed
    viewer.play()
    wait_until(lambda: viewer.session.episode.seed == seed + 1)
    viewer.pause()


def test_the_end_is_shown_before_the_next_seed_begins(viewer: Viewer) -> None:
    viewer.choose("zero")
    viewer.step(viewer.session.env.horizon - 1)
    viewer.refresh()
    shown = [np.array(frame.position) for frame in viewer.page.scene.frames]
    viewer.step()
    viewer.refresh()
    # The environment is at its next start already; the page shows where the last action led.
    assert np.abs(physics(viewer).xpos - np.stack(shown)).max() > 0.01
    end = np.stack([frame.position for frame in viewer.page.scene.frames])
    assert np.abs(end - np.stack(shown)).max() < 1e-3
    assert viewer.page.observations.text.content != viewer.session.env.describe(0)
    episode = viewer.session.episode
    assert (episode.end, episode.steps, episode.success) == ("out of time", 80, False)
    assert "out of time" in viewer.page.status_text()
    viewer.step()
    assert (viewer.session.episode.seed, viewer.session.episode.steps) == (4, 0)
    assert viewer.page.seed.value == 4
    viewer.refresh()
    require_same_poses(viewer)


def test_the_demonstrator_succeeds_and_the_page_says_so(viewer: Viewer) -> None:
    viewer.choose("demonstrator")
    for seed in range(3):
        viewer.reset(seed)
        while not viewer.session.episode.end:
            viewer.step()
        if viewer.session.episode.success:
            break
    viewer.refresh()
    assert "success **yes**" in viewer.page.status.content
    assert "Policy: demonstrator" in viewer.page.status.content
    assert viewer.page.plots.rewards.data[1].sum() == 1.0
    np.testing.assert_allclose(
        np.stack(viewer.page.plots.actions.data[1:], 1), viewer.session.episode.actions, rtol=1e-6
    )


def test_task_sliders_are_native_and_reach_the_world_and_the_drawing(viewer: Viewer) -> None:
    # cube_x 0.38 to 0.62, cube_y -0.2 to 0.2, cube_half 0.018 to 0.024
    viewer.set_task([0.25, 0.75, 0.5, 1.0, 0.5])
    viewer.refresh()
    assert [slider.value for slider in viewer.page.sliders][:2] == pytest.approx([0.44, 0.1])
    scene = viewer.page.scene
    cube = next(i for i, name in enumerate(scene.names) if name.endswith("_cube"))
    assert scene.frame(cube).position[:2] == pytest.approx((0.44, 0.1), abs=1e-6)
    name = next(name for name in viewer.server.scene._handle_from_node_name if "cube/" in name)
    half = viewer.server.scene.get_handle_by_name(name).vertices.max()
    assert half == pytest.approx(0.024)
    viewer.set_task([0.25, 0.75, 0.5, 0.0, 0.5])
    assert viewer.server.scene.get_handle_by_name(name).vertices.max() == pytest.approx(0.018)
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
    viewer.page.camera.value = True
    viewer.step()
    viewer.refresh()
    assert viewer.page.picture.visible and viewer.page.picture.image.shape == (288, 384, 3)
    assert viewer.page.picture.image.std() > 10
    viewer.page.camera.value = False
    viewer.step()
    viewer.refresh()
    assert not viewer.page.picture.visible


def test_a_connection_that_is_not_used_prints_nothing(viewer: Viewer, capfd, caplog) -> None:
    with socket.create_connection(("127.0.0.1", viewer.server.get_port()), timeout=5) as idle:
        idle.shutdown(socket.SHUT_WR)
        while idle.recv(1000):
            pass
    time.sleep(0.1)
    assert capfd.readouterr().err == "" and not caplog.records


def messages(data: bytes) -> list[dict]:
    packed = int.from_bytes(data[8:16], "little")
    return msgspec.msgpack.decode(zstandard.decompress(data[16 : 16 + packed]))["messages"]


CAMERA = ViewerCameraMessage(
    wxyz=(1.0, 0.0, 0.0, 0.0), position=(1.0, 0.0, 0.0), fov=1.0, near=0.01, far=100.0,
    image_height=600, image_width=800, look_at=(0.0, 0.0, 0.0), up_direction=(0.0, 0.0, 1.0),
)  # fmt: skip


def test_a_browser_gets_the_scene_and_its_presses_count(viewer: Viewer) -> None:
    version = importlib.metadata.version("viser")
    page = viewer.page
    with connect(
        viewer.url.replace("http", "ws"), subprotocols=[f"viser-v{version}"], max_size=None
    ) as client:
        names: set[str] = set()
        while not {*page.scene.names} <= names:
            names |= {str(each.get("name")) for each in messages(client.recv(timeout=20))}

        def send(message: Message) -> None:
            client.send(msgspec.msgpack.encode(message.as_serializable_dict()))

        def press(control: object, value: object) -> None:
            send(GuiUpdateMessage(control._impl.uuid, {"value": value}))

        send(CAMERA)
        wait_until(lambda: len(viewer.server.get_clients()) == 1)

        press(page.speed, 2.0)
        wait_until(lambda: viewer.speed == 2.0)
        press(page.play, True)
        wait_until(lambda: viewer.playing and viewer.session.episode.steps > 2)
        press(page.sliders[1], 0.2)
        wait_until(lambda: viewer.session.task is not None)
        assert viewer.session.task[1] == pytest.approx(1.0)
        # Nobody on this page may open a tunnel to the internet.
        send(ShareUrlRequest())
        press(page.play, True)
        wait_until(lambda: not viewer.playing)
        assert viewer.server._share_tunnel is None
    viewer.set_speed(1.0)


def test_a_world_without_scene_or_picture_shows_its_numbers() -> None:
    viewer = Viewer(alone(toy_envs.Reach(1)), port=0)
    assert viewer.page.main_view.empty and viewer.page.note.visible
    viewer.step(20)
    assert viewer.session.episode.end == "out of time"
    viewer.refresh()
    assert "No image: Reach has no camera" in viewer.page.status_text()
    x, y = viewer.session.now.next_obs["state"][0].tolist()
    assert viewer.page.observations.text.content == f"**state** [2] {x:.3g} {y:.3g}"
    seen = np.stack(viewer.page.observations.obs_plots["state"].data[1:], 1)
    assert seen.shape == (20, 2)
    # The last point is where the episode ended, not where the next one begins.
    np.testing.assert_allclose(seen[-1], (x, y), rtol=1e-6)
    assert not np.allclose(seen[-1], viewer.session.now.obs["state"][0])
    np.testing.assert_allclose(
        np.hypot(*seen.T), -np.array(viewer.session.episode.rewards), rtol=1e-5
    )
    viewer.close()


def test_an_environment_that_fails_stops_the_play_and_says_why() -> None:
    class Broken(toy_envs.Reach):
        def step(self, action):
            raise RuntimeError("the table is on fire")

    viewer = Viewer(alone(Broken(1)), port=0)
    with pytest.raises(RuntimeError, match="on fire"):
        viewer.step()
    viewer.play()
    wait_until(lambda: not viewer.playing)
    assert "**Stopped:** the table is on fire" in viewer.page.status_text()
    viewer.close()


def test_closing_ends_the_thread_and_frees_the_port() -> None:
    with Viewer(alone(toy_envs.Reach(1)), port=0) as viewer:
        port = viewer.server.get_port()
        viewer.play()
    viewer.close()
    assert viewer._thread not in threading.enumerate()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    with pytest.raises(RuntimeError, match="closed"):
        viewer.step()


def test_plots_stay_small_and_their_axis_holds_all() -> None:
    assert thinned(3).tolist() == [0, 1, 2]
    rows = thinned(5000)
    assert (len(rows), rows[0], rows[-1]) == (400, 0, 4999)
    assert reward_range(np.zeros(4)) == (-0.05, 1.05)
    assert reward_range(np.array([-3.0, 1.0])) == pytest.approx((-4.2, 4.2))
    assert reward_range(np.array([0.0, 5.0])) == pytest.approx((-0.4, 8.4))
