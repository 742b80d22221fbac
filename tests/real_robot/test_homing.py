"""The way home, turn by turn; a dry run; and a control process whose daemon is silent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embodied.core.build import ConfigError
from embodied.embodiments import fr3
from embodied.real_robot.control.homing import SHARE, Homing
from embodied.real_robot.drivers.driver import DryRunDriver
from embodied.real_robot.drivers.sim import Config, Sim
from embodied.real_robot.kernel.chain import Stage
from embodied.real_robot.kernel.checks import DaemonAlive, Heartbeat
from embodied.real_robot.kernel.messages import Command, Mode
from embodied.real_robot.safety.geometry import Box, Geometry
from embodied.real_robot.safety.geometry import Config as GeometryConfig
from tests.real_robot.test_control import DOWN, DT, LIMITS, Bench, within
from tests.tiers import usually

AWAY = fr3.HOME + np.array([0.4, 0.2, -0.3, 0.3, 0.2, 0.1, -0.5])


def at_home(bench: Bench, home: np.ndarray) -> Bench:
    bench.control.homing = Homing(home, LIMITS)
    bench.run(2)
    return bench


def slow(sent: list[np.ndarray]) -> None:
    speed = np.abs(np.diff(np.stack(sent), axis=0)).max(0) / DT
    assert (speed <= 1.05 * SHARE * np.asarray(LIMITS.velocity)).all(), speed


def test_an_idle_arm_goes_home_within_a_share_of_its_speed(tmp_path: Path) -> None:
    bench = at_home(Bench(tmp_path), AWAY)
    assert bench.ask(Command.HOME) == Mode.HOMING
    bench.run(600)
    assert bench.mode == Mode.IDLE and not bench.fault
    assert bench.sent[-1] == pytest.approx(AWAY, abs=1e-6)
    within(bench.sent)
    slow(bench.sent)


def test_a_way_home_can_be_stopped_and_is_refused_while_something_else_moves(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    bench.run(2)
    assert bench.ask(Command.HOME) == Mode.IDLE and bench.refused, "it has none"
    at_home(bench, AWAY).ask(Command.HOME)
    bench.run(60)
    assert bench.ask(Command.STOP) == Mode.STOPPING
    bench.run(100)
    assert bench.mode == Mode.IDLE
    assert np.abs(bench.sent[-1] - AWAY).max() > 0.1, "it stopped on the way"
    assert np.ptp(np.stack(bench.sent[-20:]), axis=0).max() == 0
    bench.ask(Command.ARM)
    assert bench.ask(Command.HOME) == Mode.ARMED, "only from IDLE"
    bench.ask(Command.ESTOP)
    assert bench.ask(Command.HOME) == Mode.ESTOP


SIDEWAYS = fr3.HOME + np.array([1.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])


def posted(bench: Bench, height: float, retreat: tuple[np.ndarray, ...] = ()) -> Geometry:
    """A post `height` m high between where the arm is and its home, in its chain and its way."""
    place = fr3.forward((fr3.HOME + SIDEWAYS)[None] / 2)[0][0]
    box = Box((place[0], place[1], height / 2), (0.02, 0.02, height / 2))
    geometry = Geometry(GeometryConfig("fr3", boxes=(box,)), 7)
    bench.control.chain.limiter.guards = [geometry.depths]
    bench.control.homing = Homing(SIDEWAYS, LIMITS, [geometry], retreat)
    bench.run(2)
    return geometry


@pytest.mark.parametrize("taught", [False, True])
def test_the_way_home_goes_round_a_post(tmp_path: Path, taught: bool) -> None:
    """S-7: it was a straight line in joint space, wherever that led."""
    bench, lifted = Bench(tmp_path), (fr3.HOME + SIDEWAYS) / 2 + [0, -0.5, 0, 0.5, 0, 0, 0]
    geometry = posted(bench, 0.55, (lifted,) if taught else ())
    straight = fr3.HOME + np.linspace(0, 1, 50)[:, None] * (SIDEWAYS - fr3.HOME)
    assert geometry.depth(straight) < -0.02, "the post is in the straight way"
    assert bench.ask(Command.HOME) == Mode.HOMING and not bench.reason
    bench.run(2000)
    assert bench.mode == Mode.IDLE and not bench.fault
    assert bench.sent[-1] == pytest.approx(SIDEWAYS, abs=1e-3)
    sent = np.stack(bench.sent)
    assert geometry.depth(sent) > -1e-3
    if taught:
        assert np.abs(sent - lifted).max(1).min() < 1e-2, "through the pose that was taught"
    within(bench.sent)
    slow(bench.sent)


def test_where_no_way_home_is_free_it_is_refused_in_one_line(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    posted(bench, 2.0)
    assert bench.ask(Command.HOME) == Mode.IDLE and bench.refused
    assert "no way home is free: in the straight one is geometry (" in bench.reason
    assert "box 1" in bench.reason and "\n" not in bench.reason
    before = bench.sent[-1]
    bench.run(100)
    assert (bench.sent[-1] == before).all() and not bench.fault
    bench.control.homing = Homing(fr3.HOME - 0.1, LIMITS)
    assert bench.ask(Command.HOME) == Mode.HOMING and not bench.reason


def test_what_comes_into_the_way_home_stops_it_and_is_named(tmp_path: Path) -> None:
    """It was IDLE then, as if it were home."""
    bench = Bench(tmp_path)
    geometry = posted(bench, 2.0)
    assert bench.control.homing is not None
    bench.control.homing.route.regions = []  # nothing was there when it was planned
    assert bench.ask(Command.HOME) == Mode.HOMING
    bench.control.homing.route.regions = [geometry]
    bench.run(2000)
    assert bench.mode == Mode.ESTOP
    assert bench.fault.startswith("the way home is blocked") and "geometry" in bench.fault
    assert geometry.depth(np.stack(bench.sent)) > -2e-3
    within(bench.sent)


def test_a_dry_run_holds_the_arm_and_imagines_the_rest() -> None:
    now = 100.0
    real = Sim(Config(), lambda: now)
    with DryRunDriver(real) as dry:
        first = dry.read()
        target = first.q + 0.2
        for _ in range(50):
            now += 0.01
            dry.write(first.q + (target - first.q) * min(1.0, (now - 100.0) / 0.25), 0.03)
            arm = dry.read()
        assert arm.q == pytest.approx(target) and dry.width == 0.03
        assert arm.t == now, "the stamps are the real arm's"
        assert real.read().q == pytest.approx(first.q, abs=0.03), "it was held"


def test_a_dry_run_holds_an_arm_that_was_moved_where_it_stands_after_a_reset() -> None:
    now, sent = 100.0, list[tuple[float, float]]()
    real = Sim(Config(), lambda: now)
    with DryRunDriver(real) as dry:
        first = dry.read()
        moved = first.q + 0.5  # by hand, while it was stopped and had no power
        real.write(moved, 0.02)
        for _ in range(300):
            now += 0.01
            real.read()
        real.write = lambda q, width: sent.append((float(q[0]), width))
        dry.recover()
        dry.write(first.q, 0.08)
        (place, width), stands = sent[0], real.read().q[0]
        assert abs(stands - first.q[0]) > 0.4 and place == pytest.approx(stands, abs=1e-3)
        assert width == pytest.approx(real.width)
        assert dry.read().q == pytest.approx(first.q), "what is imagined goes on"


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
    """One that comes back in time is followed again."""
    bench.moving()
    bench.alive = False
    sway(bench, 1.5)
    assert bench.mode == Mode.RUNNING and bench.speed(20) == 0
    bench.alive = True
    sway(bench, 1.0)
    assert bench.mode == Mode.RUNNING and not bench.fault and bench.speed(50) > 0.1
    bench.alive, began = False, len(bench.sent)
    sway(bench, 0.4)
    assert bench.mode == Mode.RUNNING and bench.speed(10) > 0.1, "not yet"
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


WRONG = (float("nan"), 1e9, 0.0, -1e9, float("inf"))


@pytest.mark.parametrize("time", usually(WRONG[:2], WRONG))
def test_a_wrong_time_in_the_beats_changes_nothing(bench: BeatBench, time: float) -> None:
    """Beats that do not count up are none: of a daemon that hangs in one, or an old message."""
    bench.time = time
    bench.moving()
    sway(bench, 3.0)
    assert bench.mode == Mode.RUNNING and bench.speed(50) > 0.1
    bench.alive = False
    bench.action = DOWN
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
    slow(bench.sent[began:])
    within(bench.sent)


@pytest.mark.parametrize("wish", [Command.ARM, Command.HOME])
def test_an_arm_that_may_move_is_latched_where_the_daemon_stays_away(
    bench: BeatBench, wish: Command
) -> None:
    bench.control.homing = Homing(AWAY, LIMITS)
    bench.run(10)
    assert bench.ask(wish) in (Mode.ARMED, Mode.HOMING)
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
