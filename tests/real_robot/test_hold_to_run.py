"""Hold-to-run: keys of a terminal (a pseudo-terminal), pedals (the kernel's events on a pipe), and
what the control process does when they are let go."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError, parse
from embodied.embodiments import fr3
from embodied.real_robot.control.homing import Homing
from embodied.real_robot.kernel.chain import Stage
from embodied.real_robot.kernel.checks import HoldToRun as Held
from embodied.real_robot.kernel.checks import Silence
from embodied.real_robot.kernel.mailbox import Mailbox
from embodied.real_robot.kernel.messages import DEADMAN, HEARTBEAT, VERSION, Command, Mode
from embodied.real_robot.rl.robot_env import Config, RealEnv
from embodied.real_robot.teleop.hold_to_run import (
    EVENT,
    DaemonMailbox,
    HoldToRun,
    InputKey,
    InputKeyConfig,
    TerminalKey,
    TerminalKeyConfig,
    beat,
)
from tests.builders import exit_of, node_of
from tests.real_robot.operators import Operator
from tests.real_robot.test_control import DT, LIMITS, Bench, within
from tests.real_robot.test_daemon import PATIENT, until
from tests.real_robot.test_deploy import CROWDED
from tests.real_robot.test_env import robot


class Typist:
    """Types into a pseudo-terminal, at times that the test sets."""

    def __init__(self) -> None:
        self.file, self.slave = pty.openpty()
        self.now = 1000.0
        self.key = TerminalKey(TerminalKeyConfig(), self.slave, lambda: self.now)

    def at(self, seconds: float, text: str = "") -> bool:
        """`seconds` later the text has been typed; whether that counts as held."""
        while seconds > 0.05:  # it is looked at all the while
            self.now, seconds = self.now + 0.05, seconds - 0.05
            assert not self.key.held()
        self.now += seconds
        os.write(self.file, text.encode())
        return self.key.held()


@pytest.fixture
def typist(monkeypatch: pytest.MonkeyPatch) -> Iterator[Typist]:
    # The pseudo-terminal is not the one that this test runs in.
    monkeypatch.setattr(os, "tcgetpgrp", lambda file: os.getpgrp())
    made = Typist()
    made.key.begin()
    yield made
    made.key.close()
    with contextlib.suppress(OSError):  # a test may have closed it
        os.close(made.file)
    os.close(made.slave)


def test_a_key_that_repeats_is_held(typist: Typist) -> None:
    assert not typist.at(0.0, " "), "the first character"
    assert not typist.at(0.5, " "), "after the delay of the autorepeat"
    assert all(typist.at(0.033, " ") for _ in range(20))
    assert not typist.at(0.033), "nothing came"
    assert not typist.at(0.30, " "), "that is another press"
    touched = (0.6, 0.3, 1.0, 0.26)
    assert not any(typist.at(gap, " ") for gap in touched), "a touch moves nothing"
    assert not any(typist.at(0.033, "x") for _ in range(10)), "nor do other keys"
    assert not typist.at(0.033, " ") and typist.at(0.033, "x x")


def test_what_was_typed_while_the_terminal_was_stopped_is_old(typist: Typist) -> None:
    typist.at(0.0, " ")
    assert typist.at(0.033, " ")
    os.write(typist.file, b" " * 50)
    typist.now += 3.0  # SIGSTOP, SIGCONT
    assert not typist.key.held() and not typist.key.held()
    assert not typist.at(0.033, " ") and typist.at(0.033, " "), "and held again it goes on"


def test_the_terminal_is_left_as_it_was(typist: Typist) -> None:
    assert not termios.tcgetattr(typist.slave)[3] & termios.ECHO
    assert termios.tcgetattr(typist.slave)[3] & termios.ISIG, "Ctrl-C works"
    typist.key.close()
    assert termios.tcgetattr(typist.slave)[3] & termios.ECHO
    os.close(typist.file)
    assert not typist.key.held() and not typist.key.held(), "a terminal that is gone"


def test_without_a_terminal_it_is_one_line(tmp_path: Path) -> None:
    with (tmp_path / "no").open("w+") as file, pytest.raises(ConfigError, match="no terminal"):
        TerminalKey(TerminalKeyConfig(), file.fileno())
    wrongs: list[dict[str, Any]] = [{"key": "ab"}, {"key": "\n"}, {"repeat": 0.0}, {"repeat": 1.0}]
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            parse(TerminalKeyConfig, wrong, "hold")


PEDAL = node_of("real_robot.teleop.hold_to_run.InputKey", code=48)


class Pedal:
    """A pipe with the kernel's events."""

    def __init__(self, folder: Path) -> None:
        path = folder / "event3"
        os.mkfifo(path)
        self.key = InputKey(InputKeyConfig(str(path), 48))
        self.file = os.open(path, os.O_WRONLY)

    def say(self, kind: int, code: int, value: int) -> bool:
        os.write(self.file, EVENT.pack(0, 0, kind, code, value))
        return self.key.held()


def test_a_pedal_is_held_from_press_to_release(tmp_path: Path) -> None:
    pedal = Pedal(tmp_path)
    os.write(pedal.file, EVENT.pack(0, 0, 1, 48, 1))
    pedal.key.begin()
    assert not pedal.key.held(), "it was down before"
    assert EVENT.size == struct.calcsize("qqHHi"), "as a 64-bit kernel has it"
    assert pedal.say(1, 48, 1) and pedal.key.held(), "held without further events"
    assert pedal.say(1, 30, 0) and pedal.say(4, 4, 458757), "other keys, other kinds"
    assert pedal.say(1, 48, 2), "repeated"
    assert not pedal.say(1, 48, 0) and not pedal.key.held()
    pedal.say(1, 48, 1)
    assert not pedal.say(0, 3, 0), "events were lost: it may have been let go"
    assert pedal.say(1, 48, 1)
    os.close(pedal.file)
    assert not pedal.key.held(), "unplugged"
    pedal.key.close()


def test_a_device_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        InputKey(InputKeyConfig(str(tmp_path / "none"), 48))
    with pytest.raises(ConfigError) as error:
        parse(InputKeyConfig, {"path": "x", "code": 5000}, "hold")
    assert error.value.key == "code"
    with pytest.raises(ConfigError, match="cannot be read"):
        HoldToRun({**PEDAL, "path": "/none"})


GAMEPAD = """
import ctypes, os, sys
os.environ["SDL_VIDEODRIVER"] = "dummy"
import pygame
from embodied.core.build import build
from embodied.real_robot.teleop.hold_to_run import HoldDevice
pygame.display.init()
pygame.joystick.init()
bundled = [l.split()[-1] for l in open("/proc/self/maps") if "libSDL2-" in l]
if not bundled:
    sys.exit("pygame's own SDL is not there")
sdl = ctypes.CDLL(bundled[0])
index = sdl.SDL_JoystickAttachVirtual(1, 6, 12, 0)
sdl.SDL_JoystickOpen.restype = ctypes.c_void_p
stick = ctypes.c_void_p(sdl.SDL_JoystickOpen(index))
pad = build({"_target_": "embodied.real_robot.teleop.devices.Gamepad", "hold": 5}, HoldDevice)
pad.begin()
assert pad.hint == "hold button 5 of gamepad 0 down" and not pad.held()
for down in (1, 0, 1):
    sdl.SDL_JoystickSetVirtualButton(stick, 5, down)
    assert pad.held() == bool(down)
sdl.SDL_JoystickDetachVirtual(index)
assert not pad.held(), "unplugged"
print("fine")
"""


def test_a_gamepads_button_is_held_until_it_is_let_go_or_unplugged() -> None:
    """A virtual joystick of SDL, in a process of its own; no window is in front."""
    pytest.importorskip("pygame")
    done = subprocess.run([sys.executable, "-c", GAMEPAD], capture_output=True, text=True)
    if "own SDL is not there" in done.stderr:
        pytest.skip(done.stderr)
    assert "fine" in done.stdout, done.stderr


def test_beats_go_on_in_a_mailbox_that_was_made_anew(tmp_path: Path) -> None:
    beats = DaemonMailbox(tmp_path / DEADMAN, HEARTBEAT, write=True)
    beat(beats, 1.0)  # no daemon yet: no error
    first = Mailbox(tmp_path / DEADMAN, HEARTBEAT, VERSION, create=True)
    beat(beats, 2.0)
    assert first.receive() and first.fields["count"] == 1 and first.fields["time"] == 2.0
    (tmp_path / DEADMAN).unlink()
    second = Mailbox(tmp_path / DEADMAN, HEARTBEAT, VERSION, create=True)
    beat(beats, 3.0)
    assert second.receive() and second.fields["time"] == 3.0
    beats.close()


def test_a_sender_is_silent_by_the_clock_of_who_listens() -> None:
    silence = Silence()
    assert silence(5.0) == np.inf
    silence.hear(1, 10.0, 10.0)
    assert silence(10.2) == pytest.approx(0.2)
    silence.hear(1, 10.3, 10.3)
    assert silence(10.3) == pytest.approx(0.3), "the same beat again"
    silence.hear(2, 99.0, 11.0)
    assert silence(11.5) == pytest.approx(0.5), "from the future: it grows old all the same"
    silence.hear(3, 11.0, 20.0)
    assert silence(20.0) == pytest.approx(9.0), "this process slept meanwhile"
    silence.hear(4, float("nan"), 21.0)
    assert silence(21.0) == np.inf


class HoldBench(Bench):
    """The bench with an operator's hand, which holds while `hand` is true."""

    hand = False

    def further(self) -> list[Stage]:
        return [Held()]

    def run(self, turns: int) -> None:
        for _ in range(turns):
            if self.hand:
                fields = self.there.deadman.fields
                fields["count"] += 1
                fields["time"] = self.now
                self.there.deadman.send()
            super().run(1)

    def speed(self) -> float:
        """rad/s that was sent last."""
        return float(np.abs(self.sent[-1] - self.sent[-2]).max()) / DT


@pytest.fixture
def bench(tmp_path: Path) -> HoldBench:
    return HoldBench(tmp_path)


def test_it_moves_only_while_it_is_held(bench: HoldBench) -> None:
    bench.moving()
    assert bench.mode == Mode.RUNNING and np.ptp(np.stack(bench.sent), axis=0).max() == 0
    bench.hand = True
    bench.run(50)
    assert bench.speed() > 0.1
    bench.hand = False
    bench.run(20)
    assert bench.speed() > 0.1, "a quarter of a second has not passed"
    bench.run(60)
    assert bench.speed() == 0 and bench.mode == Mode.RUNNING and not bench.fault
    rested = bench.sent[-1].copy()
    bench.run(200)
    assert bench.sent[-1] == pytest.approx(rested, abs=1e-9)
    bench.hand = True
    bench.run(2)
    assert np.abs(bench.sent[-1] - rested).max() < 1e-3, "it goes on from where it is"
    bench.run(50)
    assert bench.speed() > 0.1
    within(bench.sent)


def test_a_way_home_waits_for_the_hand(bench: HoldBench) -> None:
    away = fr3.HOME + np.array([0.4, 0, 0, 0, 0, 0, 0])
    bench.control.homing = Homing(away, LIMITS)
    bench.run(5)
    assert bench.ask(Command.HOME) == Mode.HOMING
    bench.run(100)
    assert bench.speed() == 0 and bench.mode == Mode.HOMING
    bench.hand = True
    bench.run(40)
    fast = bench.speed()
    assert fast > 0.1
    bench.hand = False
    bench.run(300)
    assert bench.speed() == 0 and bench.mode == Mode.HOMING
    begun = len(bench.sent)
    bench.hand = True
    bench.run(400)
    assert bench.mode == Mode.IDLE and bench.sent[-1] == pytest.approx(away, abs=1e-6)
    resumed = np.abs(np.diff(np.stack(bench.sent[begun:]), axis=0)).max() / DT
    assert resumed < 0.26 * LIMITS.velocity[0], "not faster than any way home"
    within(bench.sent)


def test_a_policy_that_dies_while_nobody_holds_it_is_still_a_fault(bench: HoldBench) -> None:
    bench.moving()
    bench.action = None
    bench.run(100)
    assert bench.mode == Mode.ESTOP and "last observation" in bench.fault


@pytest.fixture
def terminal(tmp_path: Path, folder: Path) -> Iterator[Operator]:
    words = ("deploy", "robot=sim", "demonstrator=reach", CROWDED, "seconds=600", "record=false")
    made = Operator(tmp_path, folder, *words, f"out={tmp_path / 'out'}", "hold_to_run=true")
    yield made
    made.close()


def test_the_arm_moves_while_the_space_bar_is_held(terminal: Operator, tmp_path: Path) -> None:
    def away(sent: list[float]) -> bool:
        return terminal.mode("RUNNING")["sent"] != pytest.approx(sent, abs=1e-3)

    terminal.says("Go on? [y/N]")
    terminal.types(b"y\n")
    terminal.says("hold the space bar down: the arm moves only then")
    first = terminal.mode("HOMING")["sent"]
    time.sleep(1.0)
    assert terminal.mode("HOMING")["sent"] == first, "nobody holds it: not even home"
    terminal.space.set()
    began = terminal.mode("RUNNING")["sent"]
    until(lambda: away(began), "it moves")
    terminal.space.clear()
    terminal.says("LET GO")
    time.sleep(2.0)
    held = terminal.mode("RUNNING")
    time.sleep(0.5)
    still = terminal.mode("RUNNING")
    assert still["sent"] == pytest.approx(held["sent"], abs=1e-9) and not still["fault"]
    assert still["stages"]["hold_to_run"]["count"] > 0
    terminal.space.set()
    until(lambda: away(still["sent"]), "it goes on")
    terminal.types(b"\x03")
    assert terminal.process.wait(PATIENT) == 0, terminal.text.decode()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["episodes"][0]["interventions"]["hold_to_run"] > 0


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("hold_to_run=true", "there is no terminal whose key could be held"),
        (
            "hold={_target_: embodied.real_robot.teleop.hold_to_run.TerminalKey}",
            "add hold_to_run=true",
        ),
    ],
)
def test_without_a_terminal_or_without_the_mode_it_is_one_line(
    folder: Path,
    word: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["robot=sim", "demonstrator=reach", f"folder={folder}", f"out={folder}/out", "yes=true"]
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert exit_of("deploy", *words, word) == 2
    assert reason in capsys.readouterr().err


def test_a_step_of_training_waits_for_the_hand(tmp_path: Path) -> None:
    """A pedal (the kernel's events on a pipe), which somebody presses after a while."""
    os.mkfifo(pedal := tmp_path / "event3")
    node = {**PEDAL, "path": str(pedal)}
    world = {"_target_": "embodied.envs.fr3.env.Fr3", "task": "reach"}
    config = Config({**robot(), "home": []}, world, patience=PATIENT, hold=node)
    with pytest.raises(ConfigError, match="add hold_to_run"):
        RealEnv(config)
    env = RealEnv(replace(config, robot={**config.robot, "hold_to_run": True}))
    sent: deque[Any] = deque(maxlen=20)

    def rests() -> bool:
        """What is sent has stayed for 20 ticks."""
        env.session.update()
        sent.append(env.session.state["sent"].copy())
        return len(sent) == 20 and bool(abs(sent[0] - sent[-1]).max() < 1e-6)

    foot = os.open(pedal, os.O_WRONLY)
    try:
        env.reset()
        began = env.session.state["sent"].copy()
        press = threading.Timer(2.0, lambda: os.write(foot, EVENT.pack(0, 0, 1, 48, 1)))
        press.start()
        asked = time.monotonic()
        push = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
        env.step(push)
        assert time.monotonic() > asked + 1.5, "it waited"
        for _ in range(8):
            env.step(push)
        assert abs(env.session.state["sent"] - began).max() > 0.01
        os.write(foot, EVENT.pack(0, 0, 1, 48, 0))
        until(lambda: not env.session.held, "it is let go")
        env.session.wait_until(rests, "the arm to rest", PATIENT)
        assert not env.session.fault
    finally:
        env.close()
        os.close(foot)
