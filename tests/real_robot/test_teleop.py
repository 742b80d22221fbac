"""People's hands, by what their devices say: reports on a pipe, held keys, a leader on a bus, typed
keys on a pseudo-terminal; and the commands that they lead: `embodied robot teleop` and `record`."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.commands.deploy import filming
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, allow, build, parse
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes
from embodied.datasets.lerobot.schema import DatasetError
from embodied.embodiments import fr3
from embodied.policies.scripted.intervener import Intervener
from embodied.real_robot.emulators.servos.bus import FakeBus
from embodied.real_robot.teleop import devices
from embodied.real_robot.teleop.devices import TerminalKeyboard, TerminalKeyboardConfig
from embodied.real_robot.teleop.hold_to_run import EpisodeKeys, TerminalKey, TerminalKeyConfig, keys
from embodied.real_robot.teleop.teleop import NO_INPUT, Config, Device, Held, Teleoperator
from embodied.rewards.success.interventions import InterventionWrapper
from embodied.training.logger import read_metrics
from tests.builders import node_of, recorded, spawn
from tests.real_robot.chaos import TICK, ZEROS, servos
from tests.real_robot.operators import Hand as SixAxes
from tests.real_robot.operators import Operator
from tests.real_robot.test_daemon import PATIENT, in_mode, until
from tests.real_robot.test_deploy import CROWDED, ENV, PATIENTLY, PIPED, robot, said
from tests.real_robot.test_record import files
from tests.tiers import only_all

NAMES = ("tool_x", "tool_y", "tool_z")
ACT = Leaf((5,), low=-1.0, high=1.0, names=("dx", "dy", "dz", "yaw", "gripper"))
SPEC = Spec({"state": Leaf((3,), names=NAMES)}, ACT, dt=0.05)
OBS = {"state": torch.tensor([[0.5, 0.0, 0.3]])}
FIRST = torch.tensor([True])


@dataclass(frozen=True)
class ScriptConfig:
    """Nothing."""


class Script(Device):
    """A device that is held as the list `says`, one after the other."""

    says: list[Held] = []  # noqa: RUF012
    tools: list[Any] = []  # noqa: RUF012

    def __init__(self, config: ScriptConfig) -> None:
        self.says.clear()
        self.tools.clear()

    def read(self, tool: tuple[float, float, float] | None) -> Held:
        self.tools.append(tool)
        return self.says.pop(0) if self.says else NO_INPUT

    def close(self) -> None:
        """Nothing is open."""


def held(*motion: float, grip: float = 0.0) -> Held:
    """A device that is touched; what of the six motions is not named is 0."""
    return Held((*motion, *[0.0] * (6 - len(motion))), grip, True)  # pyright: ignore[reportArgumentType]


NODE = {"_target_": f"{__name__}.Script"}


@pytest.fixture
def now() -> list[float]:
    allow("tests")
    return [100.0]


def test_a_person_has_the_arm_while_they_hold_it_and_a_moment_longer(now: list[float]) -> None:
    person = Teleoperator(Config(NODE, linger=0.3, speed=0.5), SPEC, clock=lambda: now[0])
    actor = Actor(person, 1)
    Script.says += [NO_INPUT, held(1.0, -0.2, 0.0, 0.9, 0.0, 0.3, grip=-1.0)]
    assert actor(OBS, FIRST)[0].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0], "an open hand"
    assert not actor.extras["intervened"].item()
    moved = actor(OBS, ~FIRST)[0].tolist()
    assert moved == pytest.approx([0.5, -0.2, 0.0, 0.3, -1.0]), "no faster than speed; no roll"
    assert actor.extras["intervened"].item()
    assert Script.tools[-1] == pytest.approx((0.5, 0.0, 0.3))
    now[0] += 0.2
    assert actor(OBS, ~FIRST)[0].tolist() == [0, 0, 0, 0, -1.0], "let go: still, the hand as it was"
    assert actor.extras["intervened"].item()
    now[0] += 0.2
    actor(OBS, ~FIRST)
    assert not actor.extras["intervened"].item()


class Hand(VecEnv):
    """One arm whose gripper follows the last number of the action."""

    num_envs = 1
    spec = SPEC

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        return OBS

    def step(self, action: Tensor) -> Step:
        self.gripper = float(action[0, -1])
        never = torch.zeros(1, dtype=torch.bool)
        return Step(OBS, OBS, torch.zeros(1), never, never, {})


def test_taking_over_in_training_leaves_the_hand_as_it_was(now: list[float]) -> None:
    """The policy holds something; the person lifts it, opens the hand, and gives the arm back."""
    node = node_of("real_robot.teleop.teleop.TeleopIntervener", device=NODE, linger=0.0)
    person = build(node, Intervener, spec=SPEC, num_envs=1, seed=0, clock=lambda: now[0])
    arm = Hand()
    env = InterventionWrapper(arm, person, rewards_takeover=False)
    closed = torch.tensor([[0.0, 0.0, -1.0, 0.0, -1.0]])
    lift, opens = held(0.0, 0.0, 0.7), held(0.0, 0.0, 0.7, grip=1.0)

    def step(*says: Held) -> list[float]:
        """What was executed, with the device as it `says`, now and for the next step."""
        Script.says[:] = says
        step = env.step(closed)
        executed: list[float] = step.log["executed"][0].tolist()
        assert arm.gripper == executed[-1]
        return executed

    env.reset()
    assert step(NO_INPUT, lift) == [0, 0, -1, 0, -1], "the policy's"
    assert step(lift, lift) == pytest.approx([0, 0, 0.7, 0, -1]), "lifted, and not dropped"
    assert step(opens, lift) == pytest.approx([0, 0, 0.7, 0, 1]), "the person opens it"
    assert step(lift, NO_INPUT) == pytest.approx([0, 0, 0.7, 0, 1]), "and it stays open"
    assert step(NO_INPUT, lift) == [0, 0, -1, 0, -1], "the policy closes it again"
    assert step(lift, NO_INPUT) == pytest.approx([0, 0, 0.7, 0, -1])
    Script.says[:] = [lift]
    env.reset()
    assert step(lift, NO_INPUT) == pytest.approx([0, 0, 0.7, 0, 1]), (
        "an episode begins with an open hand"
    )


def test_what_no_hand_can_move_is_refused(now: list[float]) -> None:
    for names, match in ((("q1", "q2"), "q1 cannot be teleoperated"), ((), "no names")):
        joints = SPEC.with_act(Leaf((2,), low=-1.0, high=1.0, names=names))
        with pytest.raises(ConfigError, match=match):
            Teleoperator(Config(NODE), joints)
    with pytest.raises(ConfigError, match="one arm"):
        Teleoperator(Config(NODE), SPEC, num_envs=2)


def test_keys_and_sticks() -> None:
    letters = devices.held_keys
    assert letters({"w", "d", "x", "j"}) == held(1.0, -1.0, 0.0, 0.0, 0.0, 1.0, grip=1.0)
    assert letters({"w", "s", "z", "x"}) == held()
    assert letters(set()) == NO_INPUT
    stick = devices.sticks([0.5, -1.0, 0.05, 0.2], -1.0)
    assert stick == held(1.0, -0.5, -0.2, grip=-1.0), "0.05 is let go"


def test_a_keyboard_without_its_window_in_front_moves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    board = devices.Keyboard()
    assert board.read(None) == NO_INPUT
    monkeypatch.setattr(board.pygame.key, "get_focused", lambda: True)
    down = dict.fromkeys(board.codes.values(), False) | {board.codes["r"]: True}
    monkeypatch.setattr(board.pygame.key, "get_pressed", lambda: down)
    assert board.read(None) == held(0.0, 0.0, 1.0)
    board.close()
    with pytest.raises(ConfigError, match="no gamepad 7"):
        devices.Gamepad(devices.GamepadConfig(number=7))


@pytest.fixture
def hand(tmp_path: Path) -> Iterator[SixAxes]:
    made = SixAxes(tmp_path / "hidraw0")
    yield made
    with suppress(OSError):  # a test may unplug it
        os.close(made.pipe)


def test_a_spacemouse_by_its_reports(hand: SixAxes) -> None:
    mouse = devices.SpaceMouse(devices.SpaceMouseConfig(str(hand.path)))

    def after(*report: int, kind: int = 1) -> Held:
        """What it says after a report of that kind, if there is one."""
        os.write(hand.pipe, struct.pack(f"<B{len(report)}h", kind, *report) if report else b"")
        return mouse.read(None)

    assert after() == NO_INPUT
    assert after(0, -350, 175) == held(1.0, 0.0, -0.5)
    assert after().motion[0] == 1.0, "as long as nothing else is said"
    assert after(0, 0, 700, kind=2).motion[5] == -1.0, "no more than all of it"
    assert after(0, 0, 0, 0, 20, 0) == NO_INPUT, "a little is nothing"
    assert after(1, kind=3) == held(grip=-1.0)
    os.close(hand.pipe)
    assert mouse.read(None) == NO_INPUT, "unplugged is let go"
    random = np.random.default_rng(0)
    for _ in range(5000):  # it survives any report
        mouse.hear(bytes(random.integers(0, 256, int(random.integers(1, 20)), dtype=np.uint8)))
        assert np.isfinite(mouse.axes).all() and len(mouse.axes) == 6
    with pytest.raises(ConfigError, match="cannot be read"):
        devices.SpaceMouse(devices.SpaceMouseConfig("/dev/nothing-here"))


def test_a_leader_is_read_and_never_held() -> None:
    with FakeBus("feetech", (ZEROS + fr3.HOME * TICK).tolist()) as bus:
        arm = servos(bus.path, "feetech", timeout=0.5)
        now = [0.0]
        settings = devices.LeaderConfig(arm=arm, kinematics="embodied.embodiments.fr3.forward")
        leader = devices.Leader(settings, lambda: now[0])
        home = tuple(fr3.forward(fr3.HOME[None])[0][0])
        assert leader.read(home) == NO_INPUT, "nobody has moved it"
        bus.servos[1].at += 100  # somebody turns its first joint by 9 degrees
        moved = leader.read(home)
        assert moved.touched
        turned = home[0] * np.array([np.cos(100 / TICK) - 1, np.sin(100 / TICK), 0.0]) / 0.025
        assert moved.motion[:3] == pytest.approx(turned, abs=0.05)
        now[0] += 0.6
        assert leader.read(home) == NO_INPUT, "it rests: let go"
        assert not any(servo.table[servo.TORQUE] for servo in bus.servos.values())
        bus.unplug()
        assert leader.read(home) == NO_INPUT
        leader.close()


class Typist:
    """Types into a pseudo-terminal, at times that the test sets."""

    def __init__(self) -> None:
        self.file, self.slave = pty.openpty()
        self.now = 1000.0
        self.keyboard = TerminalKeyboard(TerminalKeyboardConfig(), self.slave, lambda: self.now)

    def after(self, seconds: float, text: bytes = b"") -> tuple[float, ...] | None:
        """The motion and the grip `seconds` later, when `text` was typed; None: not touched."""
        self.now += seconds
        os.write(self.file, text)
        held = self.keyboard.read(None)
        return (*held.motion[:3], held.grip) if held.touched else None


@pytest.fixture
def typist(monkeypatch: pytest.MonkeyPatch) -> Iterator[Typist]:
    # The pseudo-terminal is not the one that this test runs in.
    monkeypatch.setattr(os, "tcgetpgrp", lambda file: os.getpgrp())
    made = Typist()
    yield made
    made.keyboard.close()
    os.close(made.file)
    os.close(made.slave)


def test_a_typed_key_is_held_for_a_moment(typist: Typist) -> None:
    assert typist.after(0.1) is None
    assert typist.after(0.1, b"w") == (1, 0, 0, 0)
    assert typist.after(0.1) == (1, 0, 0, 0)
    assert typist.after(0.15) is None
    assert typist.after(0.05, b"az") == (0, 1, 0, -1), "two at once"
    assert typist.after(0.3, b"q") is None, "no key of the arm"
    for key, pressed in ((b"\x1b[C", "next"), (b"\x1b[A", "")):  # nor are those of the episode
        assert typist.after(0.1, key) is None and typist.keyboard.pressed() == pressed
        assert typist.keyboard.pressed() == "", "once"
    typist.after(0.0, b"w")
    assert typist.after(5.0, b"dddd") is None, "old: nobody looked while the arm went home"
    assert typist.after(0.1) is None


def test_the_terminal_has_one_reader_and_is_left_as_it_was(typist: Typist) -> None:
    assert not termios.tcgetattr(typist.slave)[3] & termios.ECHO
    with pytest.raises(ConfigError, match="want the terminal's keys"):
        TerminalKey(TerminalKeyConfig(), typist.slave).begin()
    with EpisodeKeys(typist.slave, used=False) as none:
        os.write(typist.file, b"\x1b[C")
        assert none.pressed() == ""
    typist.keyboard.close()
    assert termios.tcgetattr(typist.slave)[3] & termios.ECHO
    typist.keyboard.close()


def test_without_a_terminal_it_is_one_line(tmp_path: Path) -> None:
    with (tmp_path / "no").open("w+") as file, pytest.raises(ConfigError, match="in the foregr"):
        TerminalKeyboard(TerminalKeyboardConfig(), file.fileno())
    for hold in (0.0, 0.6):
        with pytest.raises(ConfigError, match="hold="):
            parse(TerminalKeyboardConfig, {"hold": hold}, "device")


TRAIN = (
    *("env=robot", "robot@env.robot=sim", "env.horizon=40", "policy=gaussian", "policy.hidden=[8]"),
    *("learner=sac", "learner.hidden=[8]", "learner.batch_size=8", "reward=corrected_by_person"),
    *("data.actors=1", "data.warmup_steps=20", "data.utd_ratio=0.2", "data.when_behind=skip"),
    # Of a busy machine that also runs tests.
    *("env.robot.fresh.hold=2", "env.robot.fresh.stop=6", "env.robot.fresh.state=4"),
    *("steps=90", "log_every=10", "eval_every=0", "save_every=0", "video=false"),
    *("eval.num_envs=1", "eval.episodes=1"),
)


@only_all
def test_a_person_takes_over_in_an_actor_process(tmp_path: Path) -> None:
    """The terminal of `embodied train` is read by its actor; one hears the keys, and the terminal
    is as before at the end."""
    process, terminal = pty.fork()
    if process == 0:
        words = [sys.executable, "-m", "embodied.cli", "train", *TRAIN, f"out={tmp_path / 'run'}"]
        os.execv(sys.executable, words)
    echo, said = termios.tcgetattr(terminal)[3] & termios.ECHO, b""
    end, typing = time.monotonic() + 300, False
    while time.monotonic() < end:
        try:
            ready = select.select([terminal], [], [], 0.03)[0]
            said += os.read(terminal, 65536) if ready else b""
        except OSError:  # the program ended
            break
        typing = typing or b"keys of this terminal" in said
        if typing and taken(tmp_path / "run") < 3:
            os.write(terminal, b"w")
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0, said.decode()
    assert taken(tmp_path / "run") >= 3, said.decode()
    assert echo and b"wwwww" not in said, "what is typed is not shown"


def taken(folder: Path) -> int:
    """Lines of the log in which a person chose steps."""
    return sum(line.get("train/intervened", 0.0) > 0 for line in read_metrics(folder))


RIGHT, LEFT, ESCAPE = b"\x1b[C", b"\x1b[D", b"\x1b"


def test_episodes_are_recorded_kept_discarded_and_gone_on_with(
    tmp_path: Path, folder: Path, hand: SixAxes, request: pytest.FixtureRequest
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
    """The third one, and Ctrl-C in the fourth."""
    short = ("episodes=2", "seconds=1", "reset_seconds=0", "yes=true", f"logs={where / 'enough'}")
    code, text = robot(capsys, *words, *short)
    assert code == 2 and "has 2 episodes already; for ten more: episodes=12" in text
    more = ("episodes=4", "seconds=600", "yes=true")
    operator = Operator(where, folder, "robot", *words, *more)
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
    episodes = read_episodes(where / "demos")
    assert len(episodes) == 3, "what was interrupted is not kept"
    assert len(episodes.episode(2)["action"]) > 10


def led_on(operator: Operator, ticks: int) -> None:
    """Wait for so many ticks of a running arm."""
    began = operator.mode("RUNNING")["control"]["tick"]
    until(lambda: operator.mode("RUNNING")["control"]["tick"] > began + ticks, "some steps")


@only_all
def test_teleop_drives_an_arm_of_servos(tmp_path: Path, folder: Path, hand: SixAxes) -> None:
    """Over the emulated bus. Nothing is recorded; Ctrl-C ends it."""
    words = ("teleop", "robot=so101_sim", "robot.driver.timeout=0.3", *hand.words, *PATIENTLY)
    told = (*words, "yes=true", f"folder={folder}", f"out={tmp_path / 'o'}")
    pipes = PIPED | {"stdin": subprocess.DEVNULL}
    teleop = spawn("-m", "embodied.cli", "robot", *told, cwd=tmp_path, env=ENV, **pipes)
    try:
        began = until(lambda: in_mode(folder, "RUNNING"), "it runs")
        assert began["intervened"] and "recorder" not in began
        hand.push(0, -350, 0)

        def away() -> float:
            now = in_mode(folder, "RUNNING")
            return 0.0 if now is None else float(np.abs(np.subtract(now["q"], began["q"])).max())

        until(lambda: away() > 0.1, "it is led away")
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
    hand: SixAxes,
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
