"""A deployment at work is watched: what is shown is so, and nothing of it is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from viser._messages import GuiUpdateMessage
from websockets.exceptions import InvalidMessage, InvalidStatus

from embodied.core.build import build
from embodied.embodiments import fr3, so101
from embodied.embodiments.controller import Controller
from embodied.real_robot.assemble import open_channels
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import CHUNK, Role
from embodied.real_robot.kernel.mailbox import Mailbox, MailboxError
from embodied.real_robot.kernel.messages import VERSION, Mode, state_record
from embodied.viewer.robot.app import (
    PLOTS,
    RobotArm,
    RobotHistory,
    RobotViewer,
    monitor,
    plan_joints,
)
from embodied.viewer.robot.monitor import RobotMonitor, WatchedMailbox
from embodied.viewer.robot.words import interventions, rate_limited, table
from tests.builders import ROOT
from tests.viewer.browser import Browser, program, until
from tests.viewer.sessions import CAMERA, line_to, send

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
# For a machine that does much else at the same time, and episodes that end when they are told to.
PATIENT = "robot.fresh={hold: 1.0, stop: 10.0, state: 5.0}"
WORDS = ("demonstrator=reach", PATIENT, "seconds=900", "yes=true", "record=false")
GOAL = "robot.driver.world.ranges={goal_x: [0.9, 0.91]}"
FAR = ("robot=sim", "robot.driver.world.task=reach", GOAL)
GIVEN = "robot.given={goal_x: 0.9, goal_y: 0.0, goal_z: 0.1}"
SERVO = ("robot=so101_sim", "robot.driver.timeout=0.3", GIVEN)
JOINTS = 5
FRANKA = {
    "driver": {"_target_": "embodied.real_robot.drivers.franka.driver.Franka"},
    "controller": {"_target_": "embodied.embodiments.cartesian_delta.CartesianDelta"},
    "kinematics": "embodied.embodiments.fr3.forward",
    "policy": "",
    "hertz": 100.0,
    "step": 0.05,
    "limits": {
        **{"low": [-3.1] * 7, "high": [3.1] * 7, "margin": [0.0] * 7, "velocity": [2.0] * 7},
        **{"acceleration": [8.0] * 7, "jerk": [1e3] * 7, "torque": [80.0] * 7},
        "tracking": [0.3] * 7,
    },
    "fresh": {"hold": 0.2, "stop": 1.0, "state": 0.2},
    "force": 30.0,
    "given": {"goal_x": 0.5, "goal_y": 0.1, "goal_z": 0.2},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "d"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def viewer(folder: Path) -> Iterator[RobotViewer]:
    made = monitor(folder, port=0, block=False)
    yield made
    made.close()


@contextmanager
def deployed(folder: Path, output: Path, *words: str) -> Iterator[None]:
    """A deployment that is ended as by Ctrl-C, in order."""
    command = [sys.executable, "-m", "embodied.cli", "deploy", *WORDS, *words]
    process = subprocess.Popen(
        [*command, f"out={output}", f"folder={folder}"],
        cwd=folder.parent,
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    try:
        yield
        process.send_signal(signal.SIGINT)
        process.wait(600)
    finally:
        process.kill()
        process.wait()


def says(viewer: RobotViewer, *words: str) -> None:
    until(lambda: all(each in viewer.words() for each in words), why=viewer.words)


def test_a_deployment_is_watched_and_then_another_one(
    viewer: RobotViewer, folder: Path, tmp_path: Path
) -> None:
    assert f"no deployment is running in {folder}" in viewer.words()
    page, seen = viewer.page, viewer.monitor
    with deployed(folder, tmp_path / "first", *FAR):
        says(viewer, "fr3 · RUNNING", "of 100 Hz", "goal_x 0.9", "newest observation")
        until(lambda: len(page.history.samples) > 2)
        assert page.scene is not None and len(page.scene.meshes) > 20
        assert page.arm is not None and page.arm.model is not None and not page.marks
        goal = next(i for i, name in enumerate(page.arm.model.bodies()) if name.endswith("goal"))
        assert page.arm.model.poses()[0][goal][0] == pytest.approx(0.905, abs=0.006)
        assert all(0 < rate < 500 for rate in page.history.curve(PLOTS[0])), "ticks a second"
        until(lambda: len(page.paths.shown) == 2)  # the plan, and where the tool was
        assert seen.state is not None and seen.status["control"]["died"] == ""
        assert page.history.curve("limits")[-1] >= 0
    says(viewer, "the deployment has ended", "fr3 · finished")
    assert "ESTOP" not in page.head.content, "it latched nothing"
    assert not any(folder.glob("state")), "what is watched can still go"
    summary = json.loads((tmp_path / "first" / "summary.json").read_text())
    assert summary["episodes"][0]["end"] == "stopped from the keyboard"
    with deployed(folder, tmp_path / "second", *SERVO):
        says(viewer, "so101 · RUNNING", "of 50 Hz")
        assert "the deployment has ended" not in viewer.words()
        page = viewer.page
        until(lambda: list(page.marks) == ["goal"] and page.scene is not None)
        assert page.marks["goal"].position[0] == pytest.approx(0.9), "given, no body of the model"
        assert page.arm is not None and page.arm.model is not None
        assert viewer.monitor.state is not None
        hand = page.arm.posed.data.site("tool").xpos
        tool = so101.forward(np.asarray(viewer.monitor.state["q"])[None])[0][0]
        assert np.abs(hand - tool).max() < 0.1, "the model stands where the kinematics say"
        if program() is not None:
            in_a_browser(viewer)


@pytest.mark.skipif(program() is None, reason="there is no Chromium (Debian: chromium)")
def test_no_line_is_cut_on_a_narrow_screen(viewer: RobotViewer) -> None:
    with Browser(viewer.url, (1100, 720)) as browser:
        browser.wait("document.body.innerText.includes('waiting for one')")
        for wide in (1100, 375):
            browser.resize(wide, 760, mobile=wide < 400)
            until(lambda: browser.run("document.documentElement.scrollWidth") <= wide)  # noqa: B023
            none_is_cut(browser)


def in_a_browser(viewer: RobotViewer) -> None:
    with Browser(viewer.url, (1100, 720)) as browser:
        browser.wait("document.body.innerText.includes('RUNNING')")
        browser.wait("document.body.innerText.includes('of 50 Hz')")
        browser.wait("document.querySelectorAll('.uplot').length >= 5")
        assert "ticks shaped by rate limits" in browser.words()
        until(lambda: browser.picture()[200:500, 100:600].std() > 5)
        assert not [each for each in browser.said if "favicon" not in each]
        browser.resize(375, 760, mobile=True)
        until(lambda: browser.run("document.documentElement.scrollWidth") <= 375)
        none_is_cut(browser)


def none_is_cut(browser: Browser) -> None:
    cut = "[...document.querySelectorAll('.robot')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    until(lambda: browser.run(f"{cut}.length") == 0, why=lambda: browser.run(f"{cut}[0].innerText"))


def state_of(mode: Mode = Mode.RUNNING, **fields: object) -> np.ndarray:
    made = np.zeros(1, state_record(JOINTS, 2))
    made["mode"] = mode
    for name, value in fields.items():
        made[name] = value
    return made


def test_a_mailbox_is_read_and_cannot_be_written(tmp_path: Path) -> None:
    theirs = Mailbox(tmp_path / "chunk", CHUNK, VERSION, create=True)
    theirs.path.chmod(0o400)
    ours = WatchedMailbox(tmp_path / "chunk", CHUNK)
    assert not ours.receive()
    theirs.fields["number"] = 7
    theirs.send()
    assert ours.receive() and ours.fields["number"][0] == 7 and not ours.receive()
    before = theirs.path.read_bytes()
    with pytest.raises(ValueError, match="read-only"):
        ours.send()
    assert theirs.path.read_bytes() == before
    assert ours.current
    theirs.path.unlink()
    assert not ours.current
    Mailbox(tmp_path / "chunk", CHUNK, VERSION, create=True)
    assert not ours.current, "another one of the same name"
    with pytest.raises(MailboxError, match="version"):
        WatchedMailbox(tmp_path / "chunk", state_record(JOINTS, 2))
    with pytest.raises(FileNotFoundError):
        WatchedMailbox(tmp_path / "none", CHUNK)


def test_what_is_half_made_or_broken_is_waited_for(folder: Path) -> None:
    seen = RobotMonitor(folder)
    (folder / "state").write_bytes(b"")
    assert not seen.poll() and seen.number == 0 and not seen.alive
    (folder / "deployment.json").write_text("{")
    seen.poll()
    assert "cannot be read" in seen.trouble
    assert sorted(each.name for each in folder.iterdir()) == ["deployment.json", "state"]


def test_processes_that_were_killed_are_missed_and_others_are_found(folder: Path) -> None:
    """Whoever is killed leaves the mailboxes where they are."""
    about, now = Deployment.parse(FRANKA), 100.0
    about.write(folder)
    boxes = open_channels(about, folder, Role.ALL, create=True)
    seen = RobotMonitor(folder, lambda: now)
    assert not seen.poll() and "no control tick yet" in seen.condition
    boxes.state.fields["now"], boxes.state.fields["mode"] = 99.9, Mode.RUNNING
    boxes.state.send()
    assert seen.poll() and seen.alive and seen.mode == "RUNNING" and not seen.condition
    seen.query_daemon()
    assert "no daemon runs" in seen.condition and seen.alive
    now = 104.9
    assert not seen.poll() and not seen.alive and "not ticked for 5 s" in seen.condition
    for path in folder.iterdir():
        path.unlink()
    about.write(folder)
    assert not seen.poll() and "has ended" in seen.condition and seen.state is not None
    open_channels(about, folder, Role.ALL, create=True)
    assert not seen.poll() and seen.number == 2 and seen.state is None, "all is new"
    seen.close()


def test_the_page_stops_the_arm_and_nothing_else(folder: Path, viewer: RobotViewer) -> None:
    """A click is a message of its websocket, behind the page's door: from another site, or without
    the token, it does not come through."""
    about = Deployment.parse(FRANKA)
    about.write(folder)
    boxes = open_channels(about, folder, Role.ALL, create=True)
    viewer.refresh()
    click = GuiUpdateMessage(viewer.page.stop._impl.uuid, {"value": True})
    for wrong in ({"origin": "http://evil.example"}, {"additional_headers": {"Host": "evil"}}):
        with pytest.raises((InvalidStatus, InvalidMessage)):
            line_to(viewer.url, **wrong)
    with RobotViewer(folder, 0, "0.0.0.0") as public, pytest.raises(InvalidStatus):
        line_to(f"http://127.0.0.1:{public.server.get_port()}")
    assert boxes.estop.number == 0
    with line_to(viewer.url, origin=viewer.url) as line:
        line.recv(timeout=30)
        send(line, CAMERA, click)  # a browser without a camera is not heard
        until(lambda: boxes.estop.number > 0)
        until(lambda: "was not seen to latch" in viewer.page.stopped.content)
    assert not boxes.request.receive(), "nothing is asked for but the stop"
    controls = viewer.server.gui._gui_input_handle_from_uuid.values()
    assert [each for each in controls if each._impl.is_button] == [viewer.page.stop]


def test_rates_and_shares_are_of_what_was_counted_in_between() -> None:
    past = RobotHistory(["workspace", "limits"])
    tool = np.zeros(3)
    chunk = np.zeros(1, CHUNK)
    chunk["seen"] = 9.9
    past.add(state_of(now=10.0, tick=100, counts=[4, 50])[0], None, tool)
    past.add(state_of(now=10.2, tick=110, late=0.030)[0], None, tool)  # the worst in between
    sent = [0.0, -0.25, 0.0, 0.0, 0.1]
    late = state_of(now=10.5, tick=125, late=0.001, counts=[4, 55], missed=2, sent=sent)
    past.add(late[0], chunk[0], tool + 0.1)
    wanted = (50.0, 30.0, 2.0, 0.6, 0.25)  # 25 ticks in 0.5 s; 10.5 - 9.9 s
    assert [past.curve(name).tolist() for name in PLOTS] == [[pytest.approx(x)] for x in wanted]
    assert past.curve("limits").tolist() == [20.0]
    assert past.curve("workspace").tolist() == [0.0]
    assert past.curve("s").tolist() == [0.5]
    trail = past.trail()
    assert trail is not None and trail.tolist() == [[0, 0, 0], [0.1, 0.1, 0.1]]
    past.add(state_of(Mode.HOMING, now=10.6)[0], None, tool)
    past.add(state_of(Mode.RUNNING, now=10.7)[0], None, tool + 0.2)
    assert past.trail() is None, "the next episode has a path of its own"


def test_limits_of_rate_are_no_interventions() -> None:
    state = {"counts": np.array([0, 95]), "tick": np.int64(100)}
    seen: Any = SimpleNamespace(state=state, stages=("workspace", "limits"))
    assert interventions(seen) == {}
    assert rate_limited(seen) == 0.95


def test_the_plan_is_what_is_left_of_the_chunk() -> None:
    """Three of five actions to the left by 15 mm each: the tool is led 45 mm there."""
    controller = build({"_target_": "embodied.embodiments.cartesian_delta.So101Delta"}, Controller)
    state = state_of(now=10.13, q=so101.HOME, sent=so101.HOME, width=0.03)[0]
    chunk = np.zeros(1, CHUNK)
    chunk["steps"], chunk["size"], chunk["start"] = 5, 4, 10.02  # 0.11 s ago: 2 steps are over
    chunk["actions"][0, :5, 1] = 1.0
    path = plan_joints(controller, 0.05, state, chunk[0])
    assert path is not None and path.shape == (4, JOINTS)
    moved = so101.forward(path)[0] - so101.forward(so101.HOME[None])[0]
    assert moved[-1] == pytest.approx([0.0, 0.045, 0.0], abs=1e-4)
    chunk["start"] = 9.5
    assert plan_joints(controller, 0.05, state, chunk[0]) is None, "it is over"
    chunk["start"], chunk["actions"][0, 3, 1] = 10.02, np.nan
    assert plan_joints(controller, 0.05, state, chunk[0]) is None, "no number is drawn"


def test_an_arm_alone_is_drawn_by_its_kinematics() -> None:
    """The real FR3 has no world that plays it: its own meshes, and what is given as a mark."""
    arm = RobotArm(Deployment.parse(FRANKA))
    state = np.zeros(1, state_record(7, 2))
    state["q"], state["width"] = fr3.HOME, 0.04
    marks = arm.put(state[0])
    assert marks.keys() == {"goal"} and marks["goal"].tolist() == [0.5, 0.1, 0.2]
    data = arm.posed.data
    assert data.qpos[:7] == pytest.approx(fr3.HOME)
    assert [data.joint(name).qpos[0] for name in fr3.FINGERS] == pytest.approx([0.02, 0.02])
    state["q"][0, 3] = np.nan
    arm.put(state[0])
    assert data.qpos[:7] == pytest.approx(fr3.HOME), "what is no number is not drawn"


def test_text_of_a_deployment_is_no_html() -> None:
    assert "<td>&lt;b&gt;</td><td>&lt;img src=x&gt;</td>" in table([("<b>", "<img src=x>")])
