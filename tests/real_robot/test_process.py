"""A emulator's process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from embodied.deploy.operate import Pace
from embodied.real_robot.emulators import process as physics_link
from embodied.real_robot.emulators.process import Process
from embodied.real_robot.emulators.servos.bus import Config, ServoArm
from embodied.real_robot.emulators.ur.controller import Config as UrConfig
from embodied.real_robot.emulators.ur.controller import UrArm
from embodied.real_robot.kernel.driver import DriverError
from tests.builders import spawn, wait_until
from tests.training.actors.helper import alive


@dataclass(frozen=True)
class Settings:
    """None that anyone knows."""

    wrong: int = 1


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("__future__", r"the emulator of the arm did not start$"),  # it says nothing and ends
        ("embodied.real_robot.emulators.ur.controller", r'did not start: .*no setting "wrong"'),
    ],
)
def test_one_that_does_not_start_leaves_nothing_but_its_last_words(module: str, says: str) -> None:
    process = Process(module, Settings(), "arm")
    with pytest.raises(DriverError, match=says):
        process.start()
    assert process.process is None and not process.folder.exists()


def test_one_that_died_is_told_of_and_leaves_nothing() -> None:
    arm = ServoArm(Config("dynamixel", (2048.0,)))
    assert Path(arm.start()["port"]).exists()
    assert arm.behind() == 0.0, "servos are where the clock says"
    folder, pid = arm.folder, arm.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DriverError, match="the servo arm does not answer"):
        arm.behind()
    assert pid and not arm.pid
    arm.stop()
    assert not folder.exists()


def test_a_machine_that_had_no_time_for_it_is_told_of() -> None:
    arm = UrArm(UrConfig((0.0, -1.5, 1.5, -1.5, -1.5, 0.0)))
    arm.start()
    try:
        assert arm.behind() < 30.0
        pace = Pace(arm.behind)
        pace.began -= 100.0
        assert 0.5 < pace.share() <= 1.2, "of a hundred seconds it has not lost many"
    finally:
        arm.stop()


def test_time_that_is_not_caught_up_with_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 0.1 s, of which 0.5 s are caught up with; the machine has 3 s for other things."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = physics_link.Pace(0.1, 0.5)
    seen = Pace(pace.behind)
    assert pace.next() == pytest.approx(0.1) and pace.behind() == 0
    now = 103.0  # due at 100.2 after this step, 2.8 s late: 2.3 are lost
    assert pace.next() == 0.0 and pace.lost == pytest.approx(2.3)
    assert pace.behind() == pytest.approx(2.8)
    for _ in range(5):  # it catches up: 5 steps, and it is where it should be but for the 2.3
        assert pace.next() == 0.0 or pace.due >= now
    assert pace.next() == pytest.approx(0.1) and pace.behind() == pytest.approx(2.3)
    now = 104.0  # 2.3 of 4 s were lost, and 0.9 of the last one are yet to be caught up with
    assert seen.share() == pytest.approx(1 - 3.2 / 4)


def test_who_is_killed_with_its_emulator_leaves_nothing_for_long(tmp_path: Path) -> None:
    """The starter alone: its emulator takes the folder away. Both at once: the next one does."""
    code = (
        "import sys; from embodied.real_robot.emulators.servos.bus import Config, ServoArm\n"
        "arm = ServoArm(Config('dynamixel', (2048.0,)))\n"
        "arm.start(); print(arm.folder, arm.pid, flush=True); sys.stdin.read()\n"
    )

    def started() -> tuple[subprocess.Popen[str], Path, int]:
        starter = spawn("-c", code, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert starter.stdout is not None
        folder, pid = starter.stdout.readline().split()
        return starter, Path(folder), int(pid)

    starter, folder, _ = started()
    with starter:
        starter.kill()
    wait_until(lambda: not folder.exists(), "the emulator takes its folder with it")
    starter, folder, pid = started()
    with starter:
        os.kill(pid, signal.SIGSTOP)  # it cannot hear that its starter ended
        starter.kill()
    os.kill(pid, signal.SIGKILL)
    assert folder.exists()
    wait_until(lambda: not alive(pid), "it is gone")
    running, other, _ = started()
    with running:
        assert other.exists() and not folder.exists()
        arm = ServoArm(Config("dynamixel", (2048.0,)))
        arm.start()
        assert other.exists(), "the folder of one that runs"
        arm.stop()
        running.kill()
