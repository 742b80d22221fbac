"""A silent daemon: the arm rests, goes on when it is back, and latches when it stays away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embodied.core.build import ConfigError
from embodied.real_robot.control.homing import Homing
from embodied.real_robot.ipc.messages import Command, Mode
from embodied.real_robot.safety.chain import Stage
from embodied.real_robot.safety.checks import DaemonAlive, Heartbeat
from tests.real_robot.test_control import DOWN, DT, LIMITS, Bench, within
from tests.real_robot.test_homing import AWAY

HOLD, STOP = 0.5, 2.0
BEAT = 5  # ticks


class BeatBench(Bench):
    """The bench with a daemon whose main loop polls every 0.05 s while it is `alive`."""

    alive = True
    time: float | None = None

    def further(self) -> list[Stage]:
        return [DaemonAlive(Heartbeat(HOLD, STOP))]

    def run(self, turns: int) -> None:
        for _ in range(turns):
            if self.alive and round(self.now / DT) % BEAT == 0:
                self.there.beat(self.now if self.time is None else self.time)
            super().run(1)

    def speed(self, last: int = 2) -> float:
        """rad/s, the most of what was sent in the `last` ticks."""
        return float(np.abs(np.diff(np.stack(self.sent[-last:]), axis=0)).max()) / DT


@pytest.fixture
def bench(tmp_path: Path) -> BeatBench:
    return BeatBench(tmp_path)


def sway(bench: BeatBench, seconds: float) -> None:
    """Up and down, so that the arm moves all the time."""
    for k in range(round(seconds / 0.1)):
        assert bench.action is not None
        bench.action = DOWN * [1, 1, 1 if k // 4 % 2 else -1, 1]
        bench.run(10)


def test_a_silent_daemon_is_held_and_then_a_latched_stop(bench: BeatBench) -> None:
    bench.moving()
    bench.alive, began = False, len(bench.sent)
    sway(bench, 0.4)
    assert bench.mode == Mode.RUNNING and bench.speed() > 0.1, "not yet"
    sway(bench, 0.5)
    assert bench.mode == Mode.RUNNING and not bench.fault
    assert bench.speed(10) == 0, "at rest"
    sway(bench, 1.0)
    assert bench.mode == Mode.RUNNING and bench.speed(100) == 0
    sway(bench, 0.3)
    assert bench.mode == Mode.ESTOP
    assert bench.fault == "the daemon has not answered for 2.0 s"
    within(bench.sent)
    rest = began + round(HOLD / DT) + round(0.5 / DT)
    assert np.ptp(np.stack(bench.sent[rest:]), axis=0).max() < 0.02
    bench.alive = True
    bench.run(20)
    assert bench.mode == Mode.ESTOP, "its return clears nothing"
    assert bench.ask(Command.RESET) == Mode.IDLE


def test_a_daemon_that_comes_back_in_time_is_followed_again(bench: BeatBench) -> None:
    bench.moving()
    bench.alive = False
    sway(bench, 1.5)
    assert bench.mode == Mode.RUNNING and bench.speed(20) == 0
    bench.alive = True
    sway(bench, 1.0)
    assert bench.mode == Mode.RUNNING and not bench.fault and bench.speed(50) > 0.1
    within(bench.sent)


@pytest.mark.parametrize("time", [0.0, -1e9, 1e9, float("nan"), float("inf")])
def test_a_wrong_time_in_the_beats_changes_nothing(bench: BeatBench, time: float) -> None:
    bench.time = time
    bench.moving()
    sway(bench, 3.0)
    assert bench.mode == Mode.RUNNING and bench.speed(50) > 0.1
    bench.alive = False
    bench.action = DOWN
    sway(bench, 2.5)
    assert bench.mode == Mode.ESTOP and "daemon" in bench.fault


def test_beats_that_do_not_count_up_are_no_beats(bench: BeatBench) -> None:
    """A daemon that hangs in its beat, or a copy of an old message."""
    bench.moving()
    bench.alive = False
    for _ in range(250):
        bench.there.heartbeat.send()
        bench.run(1)
    assert bench.mode == Mode.ESTOP and "daemon" in bench.fault


def test_an_idle_arm_is_not_latched_and_cannot_be_armed(bench: BeatBench) -> None:
    bench.alive = False
    bench.run(300)
    assert bench.mode == Mode.IDLE and not bench.fault, "no beat yet: the daemon may be starting"
    for wish in (Command.ARM, Command.HOME):
        assert bench.ask(wish) == Mode.IDLE and bench.refused
    bench.alive = True
    bench.moving()
    bench.ask(Command.STOP)
    bench.run(100)
    assert bench.mode == Mode.IDLE
    bench.alive = False
    bench.run(300)
    assert bench.mode == Mode.IDLE and not bench.fault


def test_an_armed_arm_is_latched(bench: BeatBench) -> None:
    bench.run(10)
    assert bench.ask(Command.ARM) == Mode.ARMED
    bench.alive = False
    bench.run(210)
    assert bench.mode == Mode.ESTOP and "daemon" in bench.fault


def test_the_way_home_waits_and_goes_on_at_its_own_pace(bench: BeatBench) -> None:
    bench.control.homing = Homing(AWAY, LIMITS)
    bench.run(10)
    assert bench.ask(Command.HOME) == Mode.HOMING
    bench.run(20)
    bench.alive = False
    bench.run(120)
    assert bench.mode == Mode.HOMING and bench.speed(10) == 0
    away = np.abs(bench.sent[-1] - AWAY).max()
    assert away > 0.1
    bench.alive = True
    began = len(bench.sent)
    bench.run(600)
    assert bench.mode == Mode.IDLE and not bench.fault
    assert bench.sent[-1] == pytest.approx(AWAY, abs=1e-6)
    speed = np.abs(np.diff(np.stack(bench.sent[began:]), axis=0)).max(0) / DT
    assert (speed <= 0.27 * np.asarray(LIMITS.velocity)).all(), "as slow as before"
    within(bench.sent)


def test_a_way_home_is_latched_where_the_daemon_stays_away(bench: BeatBench) -> None:
    bench.control.homing = Homing(AWAY, LIMITS)
    bench.run(10)
    bench.ask(Command.HOME)
    bench.run(60)
    bench.alive = False
    bench.run(210)
    assert bench.mode == Mode.ESTOP and "daemon" in bench.fault
    within(bench.sent)


@pytest.mark.parametrize(
    "wrong", [(0.0, 1.0), (2.0, 1.0), (np.nan, 1.0), (0.5, np.nan), (0.5, np.inf), (-1.0, 1.0)]
)
def test_what_a_heartbeat_may_be_set_to(wrong: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="heartbeat"):
        Heartbeat(*wrong)
