"""The Franka's driver: the maker's library as a client, franky-sim as the arm, in its process.
What waits here waits for something to be so; nothing is timed."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from embodied.core.build import ConfigError, build
from embodied.embodiments import fr3
from embodied.embodiments.cartesian_delta import CartesianDelta
from embodied.embodiments.cartesian_delta import Config as CartesianConfig

pytest.importorskip("franky", reason="franky-control is not installed")
pytest.importorskip("franky_sim", reason="franky-sim is not installed")

from embodied.envs.hardware_sim.franka import Config as FrankyConfig
from embodied.envs.hardware_sim.franka import Franky
from embodied.real_robot.control.chunk_follower import Chunk
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.drivers.franka.driver import Franka
from embodied.real_robot.drivers.franka.library import Own, allowed, explain, misfit, own
from embodied.real_robot.kernel.arm_state import Floats, Limits
from embodied.real_robot.kernel.checks import FreshConfig
from embodied.real_robot.kernel.driver import DriverError, StopCategory
from embodied.real_robot.kernel.messages import Command, Mode
from tests.builders import wait_until
from tests.fakes.franka_reflex import CARTESIAN_REFLEX, ReflexArm, RobotMode
from tests.real_robot.control_bench import ControlBench

ROBOTS = Path(__file__).resolve().parents[2] / "configs" / "robot"
OWN = Own(fr3.LOWER, fr3.UPPER, fr3.VELOCITY, fr3.TORQUE)


def limits_of(name: str) -> Limits:
    limits = yaml.safe_load((ROBOTS / f"{name}.yaml").read_text())["limits"]
    return Limits(**{key: tuple(each) for key, each in limits.items()})


def node(**more: Any) -> dict[str, Any]:
    """The driver as configs/robot/franka_sim.yaml has it; patient on a slow machine."""
    settings = yaml.safe_load((ROBOTS / "franka_sim.yaml").read_text())["driver"]
    return settings | {"silence": 5.0, "patience": 30.0} | more


def later(arm: Franka, seconds: float) -> None:
    """Read on until that much of the robot's own time is over: a simulated one may go slower."""
    end = arm._tick / 1000 + seconds
    wait_until(lambda: (arm.read(), arm._tick / 1000 > end)[1], "later")


def away(arm: Franka, place: Any) -> float:
    """How far the tool is from `place`, m."""
    return float(np.linalg.norm(fr3.forward(arm.read().q[None])[0][0] - place))


def follow(arm: Franka, to: Floats, seconds: float, over: float = np.inf) -> None:
    """Lead the arm to `to` in time of its own, or until its joint 1 has moved by `over` (rad)."""
    start = arm.read().q
    began, share = arm._tick / 1000, 0.0
    while share < 1.0 and abs(arm.read().q[0] - start[0]) < over:
        share = min(1.0, (arm._tick / 1000 - began) / seconds)
        arm.write(start + share * (to - start), arm.width)
        time.sleep(0.002)


TOOL = {"stiffness": 800.0, "turning": 40.0, "force": 40.0}
TURN = 0.1 * np.array([1, 1, -1, 1, -1, 1, 1])


@contextmanager
def franka(**settings: Any) -> Iterator[tuple[Franky, Franka]]:
    """A simulated Franka before an empty table, and its driver, not connected."""
    emulator = Franky(FrankyConfig())
    arm = build(node(**emulator.start(), **settings), Franka)
    try:
        yield emulator, arm
    finally:
        arm.stop()
        arm.close()
        emulator.stop()


def bench(arm: Driver, folder: Path, controller: CartesianConfig | None = None) -> ControlBench:
    return ControlBench(
        folder,
        arm,
        CartesianDelta(controller or CartesianConfig()),
        limits_of("franka_sim"),
        period=0.01,
        fresh=FreshConfig(hold=30, stop=60, state=30),
        pace=0.005,
    )


def test_a_latched_stop_lets_go_of_the_table(tmp_path: Path) -> None:
    """franky-sim says no contact force: the pull of the arm's own springs is looked at."""
    with franka() as (_, arm):
        run = bench(arm, tmp_path, CartesianConfig(low=(0.28, -0.3, -0.1)))
        springs, control = arm.springs, run.control
        assert springs is not None

        def pull() -> float:
            assert control.arm is not None
            return float(
                np.abs(springs.stiffness * (control.chain.limiter.q - control.arm.q)).max()
            )

        def say() -> None:
            now = time.monotonic()
            run.follower.take(Chunk(np.tile([0.0, 0.0, -0.5, -1.0], (64, 1)), now, now))

        def pressed() -> bool:
            say()
            assert run.mode == Mode.RUNNING and control.arm is not None, run.fault
            low = fr3.forward(control.arm.q[None])[0][0, 2]
            return low < 0.05 and pull() > 10.0 and bool((np.abs(control.arm.dq) < 0.05).all())

        run.ask(Command.ARM)
        say()
        run.turn()
        run.ask(Command.START)
        run.until(pressed, "it presses on the table")
        run.ask(Command.ESTOP)
        run.until(lambda: control.chain.resting and pull() < 4.0, "it lets go")
        for wish, mode in ((Command.RESET, Mode.IDLE), (Command.ARM, Mode.ARMED)):
            run.turn(100)
            assert pull() < 4.0
            assert run.ask(wish) == mode
        run.turn(100)
        assert run.mode == Mode.ARMED and pull() < 4.0


def test_where_the_chain_gives_up_the_arm_stops_by_itself() -> None:
    with franka(hand=None) as (_, arm):
        arm.connect()
        start = arm.read().q
        follow(arm, aside(start), 1.0, over=0.12)
        assert arm.halt() == StopCategory.HELD
        with pytest.raises(DriverError, match="127"):
            wait_until(lambda: arm.read() is None, "its motion is over")
        assert arm.halt() == StopCategory.HELD, "again"
        arm.recover()
        rest = arm.read().q
        assert abs(rest[0] - start[0]) < 0.45, "it did not go on"
        follow(arm, rest + 0.05, 0.5)


def aside(q: Floats) -> Floats:
    """Half a radian away by joint 1, towards its middle."""
    return q + np.array([0.5 if q[0] < 0 else -0.5, *[0.0] * 6])


def test_killed_ends_in_a_latched_stop_and_comes_back(tmp_path: Path) -> None:
    with franka() as (emulator, arm):
        host = arm.config.host
        arm = build(node(host=host, silence=1.0, patience=5.0), Driver)
        run = bench(arm, tmp_path)
        run.until(lambda: run.control.writer.ticks > 20, "20 ticks")
        assert (run.mode, run.fault) == (Mode.IDLE, "")
        os.kill(emulator.pid, signal.SIGKILL)
        run.becomes(Mode.ESTOP)
        assert host in run.fault and "then reset" in run.fault
        run.until(lambda: run.control.chain.resting, "at rest")
        assert run.ask(Command.RESET) == Mode.ESTOP and run.fault, "nobody is there"
        emulator.stop()
        again = Franky(FrankyConfig(host=host))
        again.start()
        try:
            assert run.ask(Command.RESET) == Mode.IDLE and not run.fault
            assert run.turn(20) == Mode.IDLE
            arm.stop()
            arm.close()
        finally:
            again.stop()


def test_frozen_is_said_before_the_library_does() -> None:
    with franka(silence=0.2, patience=1.0) as (emulator, arm):
        arm.connect()
        wait_until(lambda: arm.read().t > 0, "a state")
        os.kill(emulator.pid, signal.SIGSTOP)
        try:
            with pytest.raises(DriverError, match=r"has said nothing for 0\.[2-9]"):
                wait_until(lambda: arm.read() is None, "silence")
            with pytest.raises(DriverError, match="did not answer within 1 s"):
                build(node(host=arm.config.host, patience=1.0), Driver).connect()
            arm.stop()
            arm.close()
        finally:
            os.kill(emulator.pid, signal.SIGCONT)


def test_a_reflex_is_latched_and_cleared_by_an_operator_only(tmp_path: Path) -> None:
    with ReflexArm() as fake:
        arm = build(node(host=fake.host, hand=None), Driver)
        run = bench(arm, tmp_path)
        run.turn(5)
        fake.reflex(CARTESIAN_REFLEX)
        run.becomes(Mode.ESTOP)
        assert "cartesian_reflex" in run.fault and "clear the way" in run.fault
        run.until(lambda: run.control.chain.resting, "at rest")
        assert fake.recovered == 0
        run.ask(Command.RESET)
        assert (run.mode, run.fault, fake.recovered) == (Mode.IDLE, "", 1)
        assert run.turn(20) == Mode.IDLE
        arm.stop()
        arm.close()


def test_an_arm_that_has_stopped_itself_does_not_start() -> None:
    with ReflexArm() as fake:
        for mode, hint in ((RobotMode.kReflex, "user stop"), (RobotMode.kUserStopped, "release")):
            fake.pose(mode, CARTESIAN_REFLEX)
            with pytest.raises(DriverError, match=f"not ready: .*{hint}"):
                build(node(host=fake.host, hand=None), Driver).connect()
        fake.pose(None, None)
        with build(node(host=fake.host, hand=None), Driver) as driver:
            driver.read()


def test_nobody_there() -> None:
    said = explain("h", 'libfranka: Move command aborted: aborted by reflex! ["joint_reflex"]')
    assert said.startswith("the Franka at h: Move command aborted") and "clear the way" in said
    assert "\n" not in explain("h", "two\nlines")
    with pytest.raises(DriverError, match=r"127\.9\.9\.9: .*FCI activated in Desk"):
        build(node(host="127.9.9.9"), Driver).connect()


def test_what_is_not_set_or_no_threshold_does_not_start() -> None:
    for key in ("collision_torque", "contact_force", "payload"):
        with pytest.raises(ConfigError, match=key):
            build({name: value for name, value in node().items() if name != key}, Driver)
    for bad in ([30.0] * 4 + [20.0] * 3, [5.0] * 7, [30.0] * 6):
        with pytest.raises(ConfigError):
            build(node(collision_torque=bad), Driver)


@pytest.mark.parametrize("name", ["franka", "franka_sim"])
def test_limits_of_the_files_fit_an_fr3(name: str) -> None:
    assert misfit(limits_of(name), OWN) == ""
    near = replace(limits_of(name), margin=(0.05,) * 7)
    assert misfit(near, OWN).startswith("joint 3 may arrive")


def test_speeds_near_an_end() -> None:
    # Joint 1 at 2.5 rad: sqrt(12 (2.75010 - 2.5)) - 0.30 = 1.4324; at 0 rad what any joint may.
    q = np.zeros(7)
    q[0], q[3] = 2.5, -0.5
    down, up = allowed(q, fr3.VELOCITY)
    assert up[0] == pytest.approx(math.sqrt(12 * 0.2501) - 0.30) and down[0] == -2.62
    # Joint 4 at -0.5: up 8 (-0.1458 + 0.5), down 8 (-0.5 + 3.0481), less 0.30 each.
    assert up[3] == pytest.approx(math.sqrt(8 * 0.3542) - 0.30)
    assert down[3] == -2.62  # 4.215 is more than any joint 4 may


def test_the_arms_own_model() -> None:
    limit = '<limit lower="-1" upper="0.5" velocity="9" effort="40"/>'
    joint = f'<joint type="revolute">{limit}</joint>'
    said = own(f"<robot>{joint * 7}<joint type='fixed'/></robot>")
    assert said.high.tolist()[:2] == [0.5, 0.5] and said.low[5] == 0.5445  # the narrower
    assert said.velocity[0] == 2.62 and said.torque.tolist() == [40.0] * 4 + [12.0] * 3
    for bad in ("<robot/>", "no model", f"<robot>{joint * 6}</robot>"):
        with pytest.raises(ValueError, match="own model"):
            own(bad)


@pytest.fixture(scope="module")
def settings() -> Iterator[dict[str, Any]]:
    """A Franka that is not there, before a cube."""
    world = {"_target_": "embodied.envs.hardware_sim.fr3_task.TaskWorld", "task": "lift"}
    emulator = Franky(FrankyConfig(world=world))
    try:
        yield emulator.start()
    finally:
        emulator.stop()


@pytest.fixture
def arm(settings: dict[str, Any]) -> Iterator[Franka]:
    with build(node(**settings), Driver) as driver:
        yield driver


@pytest.fixture(params=[None, TOOL], ids=["joints", "tool"])
def held(settings: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[Franka]:
    """The arm by springs on its joints, or on its tool."""
    tool = {"stiffness": 800.0, "turning": 40.0, "force": 40.0}
    with build(
        node(**settings, tool=None if request.param == "joints" else tool), Driver
    ) as driver:
        yield driver


def test_reads_and_knows_what_stands_there(arm: Franka) -> None:
    here = arm.read()
    assert np.abs(here.dq).max() < 0.05 and here.t <= time.monotonic()
    assert abs(here.tau[3]) > 5, "joint 4 bears the weight of the arm"
    assert 0 <= arm.width <= 0.081
    # The table carries the cube, whose half size is what its middle is above it.
    seen = dict(zip(arm.sensed, arm.sense(), strict=True))
    tool = fr3.forward(here.q[None])[0][0]
    assert seen["cube_z"] == pytest.approx(seen["cube_half"], abs=2e-3) and seen["success"] == 0
    assert seen["cube_from_tool_z"] == pytest.approx(seen["cube_z"] - tool[2], abs=2e-3)
    arm.renew()
    at, place = arm.sensed.index("cube_x"), seen["cube_x"]
    wait_until(lambda: (arm.read(), abs(arm.sense()[at] - place) > 1e-3)[1], "another cube")


def test_becomes_softer_while_it_holds(held: Franka) -> None:
    """The running controller takes other gains, and goes on holding the arm."""
    low, high = held.stiffness
    assert high.tolist() == held.springs.stiffness.tolist()
    held.stiffen(0.3 * high)
    gains = held._motion.get_gains().stiffness
    assert np.allclose(gains if held.config.tool is None else np.diag(gains), 0.3 * high)
    here = held.read().q
    later(held, 0.3)
    assert np.abs(held.read().q - here).max() < 0.02
    with pytest.raises(DriverError, match="was asked for a stiffness"):
        held.stiffen(1.1 * high)
    assert (low < 0.3 * high).all()


def test_released_it_carries_its_weight_and_follows_nothing(held: Franka) -> None:
    assert not held.falls_when_released
    held.release()
    start = held.read().q
    later(held, 0.3)
    held.write(start + 0.1, held.width)  # nothing of ours does: no spring pulls it there
    later(held, 0.7)
    here = held.read().q
    assert np.abs(here - start).max() < 0.02, "it neither falls nor follows"
    held.engage()
    to = here + TURN
    follow(held, to, 0.5)
    wait_until(lambda: away(held, fr3.forward(to[None])[0][0]) < 0.01, "it follows again")


def test_stop_holds(held: Franka) -> None:
    start = held.read().q
    follow(held, aside(start), 1.0, over=0.12)
    held.stop()
    held.stop()
    wait_until(lambda: np.abs(held.read().dq).max() < 0.01, "at rest")
    rest = held.read().q
    assert 0.1 < abs(rest[0] - start[0]) < 0.3  # it did not go on to where it was sent, nor back
    later(held, 0.2)
    assert np.abs(held.read().q - rest).max() < 0.01


def test_a_jerk_does_not_swing_it_up(arm: Franka) -> None:
    to = arm.read().q + 3 * TURN

    def there() -> bool:
        arm.write(to, arm.width)
        time.sleep(0.005)
        here = arm.read()
        return bool(np.abs(here.q - to).max() < 0.01 and np.abs(here.dq).max() < 0.05)

    wait_until(there, "0.3 rad away, at once")


def test_the_hand_follows_and_nobody_waits_for_a_motion_that_was_broken_off(arm: Franka) -> None:
    """Each thread that waits for an answer that never comes would make all later commands later."""
    q = arm.read().q

    def hand(width: float, so: Callable[[], bool]) -> None:
        wait_until(lambda: (arm.write(q, width), so())[1], f"a hand on its way to {width} m")

    for width in (0.08, 0.03, 0.0):
        hand(width, lambda width=width: abs(arm.width - width) < 0.008)
    threads = threading.active_count()
    for _ in range(2):  # turned round half-way
        hand(0.0, lambda: arm.width < 0.055)
        hand(0.08, lambda: arm.width > 0.065)
    wait_until(lambda: threading.active_count() <= threads + 1, "only its last motion goes on")
    arm.read()


def test_a_hand_that_closes_is_told_to_stop(arm: Franka) -> None:
    """Also where the arm takes no commands any more."""
    q, hand = arm.read().q, arm._hand
    assert hand is not None
    wait_until(lambda: (arm.write(q, 0.08), arm.width > 0.07)[1], "open")
    wait_until(lambda: (arm.write(q, 0.0), arm.width < 0.06)[1], "closing")
    arm.write(q, arm.width)
    arm.limit_hand(0.2, 10.0)
    wait_until(lambda: hand._going == "still" and not hand._busy, "stopped")
    stopped = arm.width
    later(arm, 0.5)
    assert arm.width > max(stopped - 0.005, 0.03), "it closes no further"
    arm._lost = "it has stopped itself"
    with pytest.raises(DriverError):
        arm.write(q, 0.05)
    assert hand.wish == 0.05
    arm._lost = ""
    arm.limit_hand(0.2, 20.0)


def test_check_asks_the_arm(arm: Franka) -> None:
    limits = limits_of("franka")
    arm.check(limits)
    fast = replace(limits, velocity=(*limits.velocity[:6], 5.5))
    with pytest.raises(DriverError, match=r"limits.velocity of joint 7 .* own 5.26"):
        arm.check(fast)
    q = arm.read().q.copy()
    q[3] = 0.0
    for outside in (q, np.full(7, np.nan)):
        with pytest.raises(DriverError, match="outside of its own limits"):
            arm.write(outside, 0.04)
