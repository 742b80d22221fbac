"""The keys of a terminal drive an arm: on a pseudo-terminal, in this process and in an actor's."""

from __future__ import annotations

import os
import pty
import select
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from embodied.core.build import ConfigError, parse
from embodied.real_robot.teleop.devices import TerminalKeyboard, TerminalKeyboardConfig
from embodied.real_robot.teleop.hold_to_run import EpisodeKeys, TerminalKey, TerminalKeyConfig
from embodied.training.logger import read_metrics
from tests.tiers import only_all


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


TRAIN = ["env=robot", "robot@env.robot=sim", "policy=gaussian", "policy.hidden=[8]"]
TRAIN += ["learner=sac", "learner.hidden=[8]", "learner.batch_size=8", "reward=corrected_by_person"]
TRAIN += ["data.actors=1", "data.when_behind=skip", "data.warmup_steps=20", "data.utd_ratio=0.2"]
# Of a busy machine that also runs tests.
TRAIN += ["env.robot.fresh.hold=2", "env.robot.fresh.stop=6", "env.robot.fresh.state=4"]
TRAIN += ["steps=90", "log_every=10", "eval_every=0", "save_every=0", "eval.num_envs=1"]
TRAIN += ["eval.episodes=1", "env.horizon=40", "video=false"]


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
    rows = read_metrics(folder)
    return sum(row.get("train/intervened", 0.0) > 0 for row in rows)
