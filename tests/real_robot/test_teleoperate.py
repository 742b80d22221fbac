"""`embodied robot teleop` and `embodied robot record` on simulated robots, led by a SpaceMouse that
is a pipe, with keys typed on a pseudo-terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.commands.deploy import filming
from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes
from embodied.datasets.lerobot.schema import DatasetError
from embodied.embodiments import fr3
from embodied.real_robot.teleop.hold_to_run import EpisodeKeys, keys
from tests.builders import recorded, spawn
from tests.real_robot.operators import Hand, Operator
from tests.real_robot.test_daemon import PATIENT, in_mode, until
from tests.real_robot.test_deploy import CROWDED, ENV, PATIENTLY, robot, said
from tests.real_robot.test_record import files
from tests.tiers import only_all

RIGHT, LEFT, ESCAPE = b"\x1b[C", b"\x1b[D", b"\x1b"


@pytest.fixture
def hand(tmp_path: Path) -> Iterator[Hand]:
    made = Hand(tmp_path / "hidraw0")
    yield made
    os.close(made.pipe)


def test_episodes_are_recorded_kept_discarded_and_gone_on_with(
    tmp_path: Path, folder: Path, hand: Hand, request: pytest.FixtureRequest
) -> None:
    camera = json.dumps(files(tmp_path / "pictures")).replace('"', "")
    words = ["record", "robot=sim", "robot.driver.world.task=reach", CROWDED, *hand.words]
    words += [f"robot.cameras.side={camera}", "robot.picture=4.0", "task=push up"]
    words += [f"out={tmp_path / 'demos'}"]
    more = ("episodes=2", f"logs={tmp_path / 'o'}", "yes=true")
    operator = Operator(tmp_path, folder, "robot", *words, *more)

    def height() -> float:
        """Of the tool, m."""
        return float(fr3.forward(np.array([operator.mode("RUNNING")["q"]]))[0][0, 2])

    try:
        operator.says("episode 1 of 2")
        began = height()
        hand.push(0, 0, -350)
        for key in (LEFT, RIGHT):
            until(lambda: height() > began + 0.05, "it is led up")
            operator.types(RIGHT)
            operator.says("put the scene back", times=1 if key == LEFT else 2)
            operator.types(key)
            if key == LEFT:
                operator.says("discarded\r\n")
                operator.types(RIGHT)
                operator.says("episode 1 of 2", times=2)
        operator.says("episode 2 of 2")
        operator.mode("RUNNING")
        operator.types(LEFT)  # while it runs
        operator.says("put the scene back", times=3)
        operator.types(RIGHT)
        operator.says("episode 2 of 2", times=2)
        operator.mode("RUNNING")
        operator.types(ESCAPE)
        assert operator.process.wait(PATIENT) == 0, operator.text.decode()
    finally:
        operator.close()
    episodes = read_episodes(tmp_path / "demos")
    assert len(episodes) == 2 and set(episodes.texts) == {"push up"}
    first = episodes.episode(0)
    assert first["intervened"].all(), "LeRobot's `intervention`"
    assert (first["action"][:, 2] == 1.0).all() and first["action"].shape[1] == 4
    assert first["obs/side"].shape[1:] == (240, 320, 3)
    info = json.loads((tmp_path / "demos" / "meta" / "info.json").read_text())
    assert info["features"]["observation.images.side"]["dtype"] == "video"
    assert "discarded" in operator.text.decode()
    if request.config.getoption("--all"):
        goes_on_in_the_same_folder(tmp_path, folder, words, request.getfixturevalue("capsys"))


def goes_on_in_the_same_folder(
    where: Path, folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal and with a recorder that is killed; then the third one, and Ctrl-C in the
    fourth."""
    dataset = where / "demos"
    short = ("episodes=2", "seconds=1", "reset_seconds=0", "yes=true", f"logs={where / 'enough'}")
    code, text = robot(capsys, *words, *short)
    assert code == 2 and "has 2 episodes already; for ten more: episodes=12" in text
    long = ("episodes=4", "seconds=600")
    more = robot_command(where, folder, *words, *long, "reset_seconds=0", "robot.picture=4.0")
    try:
        status = until(lambda: in_mode(folder, "RUNNING") or more.poll(), "it runs")
        assert more.poll() is None, said(more)
        os.kill(status["recorder"]["pid"], signal.SIGKILL)
        assert len(read_episodes(dataset)) == 2, "what was finished is there"
        more.send_signal(signal.SIGINT)
        text = said(more)
    finally:
        more.kill()
    assert "SIGKILL" in text and len(read_episodes(dataset)) == 2, text
    operator = Operator(where, folder, "robot", *words, *long, "yes=true")
    try:
        for number, key in ((3, RIGHT), (4, b"\x03")):
            operator.says(f"episode {number} of 4")
            led_on(operator, 100)
            operator.types(key)
            if key == RIGHT:
                operator.says("put the scene back")
                operator.types(RIGHT)
        assert operator.process.wait(PATIENT) == 0, operator.text.decode()
        operator.says("not recorded: discarded")
    finally:
        operator.close()
    episodes = read_episodes(dataset)
    assert len(episodes) == 3, "what was interrupted is not kept"
    assert len(episodes.episode(2)["action"]) > 10


def led_on(operator: Operator, ticks: int) -> None:
    """Wait for so many ticks of a running arm."""
    began = operator.mode("RUNNING")["control"]["tick"]
    until(lambda: operator.mode("RUNNING")["control"]["tick"] > began + ticks, "some steps")


def robot_command(where: Path, folder: Path, *words: str) -> subprocess.Popen[str]:
    """`embodied robot ...` without a terminal."""
    told = (*words, *PATIENTLY, "yes=true", f"folder={folder}")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return spawn("-m", "embodied.cli", "robot", *told, cwd=where, env=ENV, **pipes)


@only_all
def test_teleop_drives_an_arm_of_servos(tmp_path: Path, folder: Path, hand: Hand) -> None:
    """Over the emulated bus. Nothing is recorded; Ctrl-C ends it."""
    words = ("teleop", "robot=so101_sim", "robot.driver.timeout=0.3", *hand.words)
    teleop = robot_command(tmp_path, folder, *words, f"out={tmp_path / 'o'}")
    try:
        began = until(lambda: in_mode(folder, "RUNNING"), "it runs")
        assert began["intervened"] and "recorder" not in began
        hand.push(0, -350, 0)

        def moved() -> bool:
            now = in_mode(folder, "RUNNING")
            return now is not None and np.abs(np.subtract(now["q"], began["q"])).max() > 0.1

        until(moved, "it is led away")
        teleop.send_signal(signal.SIGINT)
        text = said(teleop)
    finally:
        teleop.kill()
    assert teleop.returncode == 0 and "SpaceMouse: it moves the arm from here on" in text, text
    assert not (tmp_path / "o" / "recording").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("record robot=sim out=x policy=outputs/RUN", "embodied deploy policy=RUN"),
        ("teleop robot=sim teleop=null yes=true", "teleop=NAME should name the device"),
        ("teleop robot=sim teleop=joystick", "joystick"),
        ("record robot=sim episodes=3 yes=true", "out"),
        ("teleop robot=sim", "no terminal to confirm on"),
        ("record robot=sim robot.driver.world.task=reach out=x yes=true HAND", "reset_seconds=5"),
    ],
)
def test_what_cannot_be_is_one_line(
    tmp_path: Path,
    hand: Hand,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        code, text = robot(capsys, *words.replace("HAND", " ".join(hand.words)).split())
    assert code == 2 and reason in text, text


def test_keys() -> None:
    for typed, heard in (
        *((RIGHT, "next"), (b"\x1bOC", "next"), (LEFT, "discard"), (ESCAPE, "stop"), (b"x", "")),
        *((other, "") for other in (b"\x1b[A", b"\x1b[3~", b"\x1b[1;5B", b"\x1bOP", b"")),
        (b"x" + LEFT + RIGHT + b"\n", "next"),  # the newest
    ):
        assert keys(typed) == heard, typed
    read, write = os.pipe()
    with EpisodeKeys(read) as none:
        os.write(write, RIGHT)
        assert none.pressed() == "", "a pipe is no terminal"


def test_all_cameras_are_filmed() -> None:
    node = {"cameras": {"front": {}, "wrist": {}}, "filmed": {"wrist": [96, 96]}}
    made = filming(node)
    assert made["filmed"] == {"front": [240, 320], "wrist": [96, 96]} and made["images"] == "mp4"
    assert filming({"images": "png"}) == {"images": "png", "filmed": {}}


def test_the_newest_episode_is_removed(tmp_path: Path) -> None:
    spec = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
    with EpisodeWriter(tmp_path, spec) as writer:
        for value in (1.0, 2.0, 3.0):
            writer.add(recorded({"state": torch.full((4, 1), value)}, torch.zeros(3, 1)))
            if value == 2.0:
                writer.drop_newest()
        assert len(writer) == 2
    assert read_episodes(tmp_path).steps["obs/state"][:, 0].tolist() == [1, 1, 1, 3, 3, 3]
    again = EpisodeWriter(tmp_path, spec)
    with again, pytest.raises(DatasetError, match=r"embodied demos drop .* episodes=1"):
        again.drop_newest()
