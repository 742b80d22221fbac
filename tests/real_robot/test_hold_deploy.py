"""`embodied deploy hold_to_run=true` in a terminal of its own: it moves while a key repeats."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.cli import main
from embodied.core.build import ConfigError
from embodied.real_robot.rl.robot_env import Config, RealEnv
from embodied.real_robot.teleop.hold_to_run import EVENT
from tests.real_robot.operators import Operator
from tests.real_robot.test_daemon import PATIENT, until
from tests.real_robot.test_deploy import CROWDED
from tests.real_robot.test_env import robot


@pytest.fixture
def terminal(tmp_path: Path, folder: Path) -> Iterator[Operator]:
    words = ("deploy", "robot=sim", "demonstrator=reach", CROWDED, "seconds=600")
    more = ("hold_to_run=true", f"out={tmp_path / 'out'}")
    made = Operator(tmp_path, folder, *words, *more)
    yield made
    made.close()


def away(terminal: Operator, sent: list[float]) -> bool:
    """Whether the arm was sent somewhere else by now."""
    return terminal.mode("RUNNING")["sent"] != pytest.approx(sent, abs=1e-3)


def test_the_arm_moves_while_the_space_bar_is_held(terminal: Operator, tmp_path: Path) -> None:
    terminal.says("Go on? [y/N]")
    terminal.types(b"y\n")
    terminal.says("hold the space bar down: the arm moves only then")
    first = terminal.mode("HOMING")["sent"]
    time.sleep(1.0)
    assert terminal.mode("HOMING")["sent"] == first, "nobody holds it: not even home"
    terminal.space.set()
    terminal.mode("RUNNING")
    began = terminal.mode("RUNNING")["sent"]
    until(lambda: away(terminal, began), "it moves")
    terminal.space.clear()
    terminal.says("LET GO")
    held = terminal.mode("RUNNING")

    def rests() -> bool:
        nonlocal held
        before, held = held, terminal.mode("RUNNING")
        return held["sent"] == pytest.approx(before["sent"], abs=1e-9)

    until(rests, "it comes to rest")
    time.sleep(0.5)
    still = terminal.mode("RUNNING")
    assert still["sent"] == pytest.approx(held["sent"], abs=1e-9) and not still["fault"]
    assert still["stages"]["hold_to_run"]["count"] > 0
    terminal.space.set()
    until(lambda: away(terminal, still["sent"]), "it goes on")
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
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    word: str,
    reason: str,
) -> None:
    words = ["deploy", "robot=sim", "demonstrator=reach", word, "yes=true"]
    with Path(os.devnull).open() as nothing, pytest.raises(SystemExit) as left:
        monkeypatch.setattr("sys.stdin", nothing)
        main([*words, f"out={tmp_path / 'out'}", f"folder={folder}"])
    assert left.value.code == 2 and reason in capsys.readouterr().err


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
