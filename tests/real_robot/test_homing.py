"""The way home, turn by turn; a dry run; and what comes out of the ring of states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embodied.embodiments import fr3
from embodied.real_robot.control.homing import SHARE, Homing
from embodied.real_robot.drivers.dry_run import DryRunDriver
from embodied.real_robot.drivers.sim import Config, Sim
from embodied.real_robot.ipc.channels import Channels
from embodied.real_robot.ipc.messages import Command, Mode
from embodied.real_robot.ipc.ring_buffer import BlackBox
from embodied.real_robot.safety.geometry import Box, Geometry
from embodied.real_robot.safety.geometry import Config as GeometryConfig
from tests.real_robot.test_control import LIMITS, Bench, within

AWAY = fr3.HOME + np.array([0.4, 0.2, -0.3, 0.3, 0.2, 0.1, -0.5])


def at_home(bench: Bench, home: np.ndarray) -> Bench:
    bench.control.homing = Homing(home, LIMITS)
    bench.run(2)
    return bench


def test_an_idle_arm_goes_home_within_a_share_of_its_speed(tmp_path: Path) -> None:
    bench = at_home(Bench(tmp_path), AWAY)
    assert bench.ask(Command.HOME) == Mode.HOMING
    bench.run(600)
    assert bench.mode == Mode.IDLE and not bench.fault
    assert bench.sent[-1] == pytest.approx(AWAY, abs=1e-6)
    within(bench.sent)
    speed = np.abs(np.diff(np.stack(bench.sent), axis=0)).max(0) / 0.01
    assert (speed <= 1.05 * SHARE * np.asarray(LIMITS.velocity)).all(), speed


def test_a_way_home_can_be_stopped_and_is_refused_while_something_else_moves(
    tmp_path: Path,
) -> None:
    bench = at_home(Bench(tmp_path), AWAY)
    bench.ask(Command.HOME)
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


def test_an_arm_without_a_home_refuses(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(2)
    assert bench.ask(Command.HOME) == Mode.IDLE and bench.refused


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


def reason(bench: Bench) -> str:
    return bench.there.state.fields["reason"][0].decode()


@pytest.mark.parametrize("taught", [False, True])
def test_the_way_home_goes_round_a_post(tmp_path: Path, taught: bool) -> None:
    """S-7: it was a straight line in joint space, wherever that led."""
    bench, lifted = Bench(tmp_path), (fr3.HOME + SIDEWAYS) / 2 + [0, -0.5, 0, 0.5, 0, 0, 0]
    geometry = posted(bench, 0.55, (lifted,) if taught else ())
    straight = fr3.HOME + np.linspace(0, 1, 50)[:, None] * (SIDEWAYS - fr3.HOME)
    assert geometry.depth(straight) < -0.02, "the post is in the straight way"
    assert bench.ask(Command.HOME) == Mode.HOMING and not reason(bench)
    bench.run(2000)
    assert bench.mode == Mode.IDLE and not bench.fault
    assert bench.sent[-1] == pytest.approx(SIDEWAYS, abs=1e-3)
    sent = np.stack(bench.sent)
    assert geometry.depth(sent) > -1e-3
    if taught:
        assert np.abs(sent - lifted).max(1).min() < 1e-2, "through the pose that was taught"
    within(bench.sent)
    speed = np.abs(np.diff(sent, axis=0)).max(0) / 0.01
    assert (speed <= 1.05 * SHARE * np.asarray(LIMITS.velocity)).all(), speed


def test_where_no_way_home_is_free_it_is_refused_in_one_line(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    posted(bench, 2.0)
    assert bench.ask(Command.HOME) == Mode.IDLE and bench.refused
    assert "no way home is free: in the straight one is geometry (" in reason(bench)
    assert "box 1" in reason(bench) and "\n" not in reason(bench)
    before = bench.sent[-1]
    bench.run(100)
    assert (bench.sent[-1] == before).all() and not bench.fault
    bench.control.homing = Homing(fr3.HOME - 0.1, LIMITS)
    assert bench.ask(Command.HOME) == Mode.HOMING and not reason(bench)


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


def test_what_is_new_in_the_ring(tmp_path: Path) -> None:
    record = np.dtype([("tick", "<i8")])
    ring = BlackBox(tmp_path / "ring", record, 8, create=True)
    one = np.zeros(1, record)
    for tick in range(5):
        one["tick"] = tick
        ring.add(one)
    records, count = ring.since(2)
    assert records["tick"].tolist() == [2, 3, 4] and count == 5
    assert len(ring.since(count)[0]) == 0
    for tick in range(5, 20):
        one["tick"] = tick
        ring.add(one)
    records, count = ring.since(count)
    assert records["tick"].tolist() == [*range(13, 20)] and count == 20, "7 of 8 slots are safe"


def test_mailboxes_carry_what_is_sensed(tmp_path: Path) -> None:
    here, there = Channels.make(tmp_path, 7, 3, 2), Channels.open(tmp_path, 7, 3, 2)
    here.state.fields["sensed"] = [0.25, 1.0]
    here.state.send()
    assert there.state.receive() and there.state.fields["sensed"][0].tolist() == [0.25, 1.0]
