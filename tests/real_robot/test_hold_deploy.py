"""`embodied deploy hold_to_run=true` in a terminal of its own: it moves while a key repeats."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.real_robot.daemon.client import ClientError, call
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.rl.robot_env import Config, RealEnv
from embodied.real_robot.teleop.hold_to_run import EVENT
from tests.real_robot.test_daemon import PATIENT, until
from tests.real_robot.test_deploy import ENV, PATIENTLY, said, start
from tests.real_robot.test_env import robot

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
