"""Hold-to-run: keys of a terminal (a pseudo-terminal), pedals (the kernel's events on a pipe), and
what the control process does when they are let go."""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError, parse
from embodied.embodiments import fr3
from embodied.real_robot.control.homing import Homing
from embodied.real_robot.daemon.client import ClientError, call
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.ipc.mailbox import Mailbox
from embodied.real_robot.ipc.messages import DEADMAN, HEARTBEAT, VERSION, Command, Mode
from embodied.real_robot.rl.robot_env import Config, RealEnv
from embodied.real_robot.safety.chain import Stage
from embodied.real_robot.safety.checks import HoldToRun as Held
from embodied.real_robot.safety.checks import Silence
from embodied.real_robot.teleop.hold_to_run import (
    EVENT,
    Beats,
    HoldToRun,
    InputKey,
    InputKeyConfig,
    TerminalKey,
    TerminalKeyConfig,
)
from tests.real_robot.test_control import DT, LIMITS, Bench, within
from tests.real_robot.test_daemon import PATIENT, until
from tests.real_robot.test_deploy import ENV, PATIENTLY, said, start
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

    def close(self) -> None:
        os.close(self.file)
        os.close(self.slave)


@pytest.fixture
def typist(monkeypatch: pytest.MonkeyPatch) -> Iterator[Typist]:
    # The pseudo-terminal is not the one that this test runs in.
    monkeypatch.setattr(os, "tcgetpgrp", lambda file: os.getpgrp())
    made = Typist()
    made.key.begin()
    yield made
    made.key.close()
    made.close()


def test_a_key_that_repeats_is_held(typist: Typist) -> None:
    assert not typist.at(0.0, " "), "the first character"
    assert not typist.at(0.5, " "), "after the delay of the autorepeat"
    assert all(typist.at(0.033, " ") for _ in range(20))
    assert not typist.at(0.033), "nothing came"
    assert not typist.at(0.30, " "), "that is another press"


def test_a_key_that_is_only_touched_moves_nothing(typist: Typist) -> None:
    assert not any(typist.at(gap, " ") for gap in (0.0, 0.6, 0.3, 1.0, 0.26))


def test_other_keys_do_not_count(typist: Typist) -> None:
    assert not any(typist.at(0.033, "x") for _ in range(10))
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


def test_a_terminal_that_is_gone_is_not_held() -> None:
    made = Typist()
    os.close(made.file)
    assert not made.key.held() and not made.key.held()
    os.close(made.slave)


def test_without_a_terminal_it_is_one_line(tmp_path: Path) -> None:
    with (tmp_path / "no").open("w+") as file, pytest.raises(ConfigError, match="no terminal"):
        TerminalKey(TerminalKeyConfig(), file.fileno())
    wrongs: list[dict[str, Any]] = [{"key": "ab"}, {"key": "\n"}, {"repeat": 0.0}, {"repeat": 1.0}]
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            parse(TerminalKeyConfig, wrong, "hold")


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
    pedal.key.begin()
    assert not pedal.key.held()
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


def test_a_pedal_that_was_down_before_does_not_count(tmp_path: Path) -> None:
    pedal = Pedal(tmp_path)
    os.write(pedal.file, EVENT.pack(0, 0, 1, 48, 1))
    pedal.key.begin()
    assert not pedal.key.held()
    assert EVENT.size == struct.calcsize("qqHHi"), "as a 64-bit kernel has it"


def test_a_device_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        InputKey(InputKeyConfig(str(tmp_path / "none"), 48))
    with pytest.raises(ConfigError) as error:
        parse(InputKeyConfig, {"path": "x", "code": 5000}, "hold")
    assert error.value.key == "code"
    node = {
        "_target_": "embodied.real_robot.teleop.hold_to_run.InputKey",
        "path": "/none",
        "code": 1,
    }
    with pytest.raises(ConfigError, match="cannot be read"):
        HoldToRun(node)


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
    beats = Beats(tmp_path)
    beats.beat(1.0)  # no daemon yet: no error
    first = Mailbox(tmp_path / DEADMAN, HEARTBEAT, VERSION, create=True)
    beats.beat(2.0)
    assert first.receive() and first.fields["count"] == 1 and first.fields["time"] == 2.0
    (tmp_path / DEADMAN).unlink()
    second = Mailbox(tmp_path / DEADMAN, HEARTBEAT, VERSION, create=True)
    beats.beat(3.0)
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


CROWDED = "robot.driver.world.ranges={goal_x: [0.9, 0.91]}"  # nobody gets there


class Terminal:
    """`embodied deploy` on a pseudo-terminal, and who types there; `hand`: keeps the space bar
    down, at 30 characters a second."""

    def __init__(self, where: Path, folder: Path, *words: str) -> None:
        self.folder, self.hand, self.text = folder, threading.Event(), b""
        self.file, slave = pty.openpty()
        command = [sys.executable, "-m", "embodied.cli", "deploy", *words, *PATIENTLY]
        command += [f"out={where / 'out'}", f"folder={folder}", "hold_to_run=true"]
        # With fork, a pseudo-terminal would be no controlling one.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *command],
            cwd=where,
            env=ENV,
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        self.done = threading.Event()
        self.threads = [threading.Thread(target=run) for run in (self._type, self._read)]
        for thread in self.threads:
            thread.start()

    def _type(self) -> None:
        while not self.done.wait(0.033):
            if self.hand.is_set():
                os.write(self.file, b" ")

    def _read(self) -> None:
        while not self.done.is_set():
            try:
                self.text += os.read(self.file, 4096)
            except OSError:  # the other side is closed
                return

    def says(self, words: str) -> None:
        def said() -> bool:
            assert self.process.poll() is None or words.encode() in self.text, self.text.decode()
            return words.encode() in self.text

        until(said, f"it says {words!r}")

    def status(self) -> dict[str, Any] | None:
        try:
            return call(self.folder, Verb.STATUS, PATIENT).status
        except ClientError:
            return None

    def mode(self, name: str) -> dict[str, Any]:
        return until(
            lambda: s if (s := self.status()) and s["mode"] == name else None, f"it is {name}"
        )

    def away(self, sent: list[float]) -> bool:
        """Whether the arm was sent somewhere else by now."""
        return self.mode("RUNNING")["sent"] != pytest.approx(sent, abs=1e-3)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.done.set()
        typing, reading = self.threads
        typing.join()
        os.close(self.file)
        reading.join()


@pytest.fixture
def terminal(tmp_path: Path, folder: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path, folder, "robot=sim", "demonstrator=reach", CROWDED, "seconds=600")
    yield made
    made.close()


def test_the_arm_moves_while_the_space_bar_is_held(terminal: Terminal, tmp_path: Path) -> None:
    terminal.says("Go on? [y/N]")
    os.write(terminal.file, b"y\n")
    terminal.says("hold the space bar down: the arm moves only then")
    first = terminal.mode("HOMING")["sent"]
    time.sleep(1.0)
    assert terminal.mode("HOMING")["sent"] == first, "nobody holds it: not even home"
    terminal.hand.set()
    terminal.mode("RUNNING")
    began = terminal.mode("RUNNING")["sent"]
    until(lambda: terminal.away(began), "it moves")
    terminal.hand.clear()
    terminal.says("LET GO")
    time.sleep(2.0)
    held = terminal.mode("RUNNING")
    time.sleep(0.5)
    still = terminal.mode("RUNNING")
    assert still["sent"] == pytest.approx(held["sent"], abs=1e-9) and not still["fault"]
    assert still["stages"]["hold_to_run"]["count"] > 0
    terminal.hand.set()
    until(lambda: terminal.away(still["sent"]), "it goes on")
    os.write(terminal.file, b"\x03")
    assert terminal.process.wait(PATIENT) == 0, terminal.text.decode()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["episodes"][0]["interventions"]["hold_to_run"] > 0


def test_without_a_terminal_or_without_the_mode_it_is_one_line(
    tmp_path: Path, folder: Path
) -> None:
    words = ("robot=sim", "demonstrator=reach")
    deploy = start(tmp_path, folder, *words, "hold_to_run=true")
    text = said(deploy)
    assert deploy.returncode == 2 and "there is no terminal whose key could be held" in text
    (tmp_path / "out").rename(tmp_path / "before")
    device = "hold={_target_: embodied.real_robot.teleop.hold_to_run.TerminalKey}"
    deploy = start(tmp_path, folder, *words, device)
    text = said(deploy)
    assert deploy.returncode == 2 and "add hold_to_run=true" in text


def test_a_step_of_training_waits_for_the_hand(tmp_path: Path) -> None:
    """A pedal (the kernel's events on a pipe), which somebody presses after a while."""
    os.mkfifo(pedal := tmp_path / "event3")
    node = {
        "_target_": "embodied.real_robot.teleop.hold_to_run.InputKey",
        "path": str(pedal),
        "code": 48,
    }
    world = {"_target_": "embodied.envs.fr3.env.Fr3", "task": "reach"}
    config = Config({**robot(), "home": []}, world, patience=PATIENT, hold=node)
    with pytest.raises(ConfigError, match="add hold_to_run"):
        RealEnv(config)
    env = RealEnv(replace(config, robot={**config.robot, "hold_to_run": True}))
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
        env.session.wait_until(still(env), "the arm to rest", PATIENT)
        assert not env.session.fault
    finally:
        env.close()
        os.close(foot)


def still(env: RealEnv) -> Callable[[], bool]:
    """Whether what is sent has stayed for 20 ticks."""
    sent: deque[Any] = deque(maxlen=20)

    def so() -> bool:
        env.session.update()
        sent.append(env.session.state["sent"].copy())
        return len(sent) == 20 and bool(abs(sent[0] - sent[-1]).max() < 1e-6)

    return so
