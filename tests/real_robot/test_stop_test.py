"""The stop test at start, and latched stops that the arm does not follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.real_robot.control.chunk_follower import control_loop
from embodied.real_robot.drivers.ur.driver import UR, Config
from embodied.real_robot.emulators.ur.controller import PROTECTIVE, FakeUR
from embodied.real_robot.ipc.channels import Channels
from embodied.real_robot.kernel.arm_state import ArmState
from embodied.real_robot.kernel.chain import Chain
from embodied.real_robot.kernel.checks import Enabled, Finite, Fresh, FreshConfig, Tracking
from embodied.real_robot.kernel.driver import DriverError, StopCategory
from embodied.real_robot.kernel.limiter import Limiter
from embodied.real_robot.kernel.messages import Command, Mode
from tests.builders import wait_until
from tests.real_robot.long_run import deployment
from tests.real_robot.test_control import Bench, follower


class Forgetful(Chain):
    """A chain that latches nothing."""

    @property
    def fault(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ""

    @fault.setter
    def fault(self, reason: str) -> None:
        """Forget it."""


def test_a_session_begins_with_a_stop_that_moves_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    control: Any = bench.control
    written: list[Any] = []
    control.driver.write = lambda q, width: written.append(q)
    control.driver.cut = lambda: written.append("a drone would be locked")
    before = control.chain.limiter.q.copy()
    control.test_stop()
    assert not written and (control.chain.limiter.q == before).all()
    assert control.mode == Mode.IDLE and not control.fault and not control.chain.fault
    assert not control.chain.counts.any()
    del control.driver.write
    bench.moving()
    assert bench.mode == Mode.RUNNING


@pytest.mark.parametrize("broken", ["button", "latch"])
def test_a_stop_that_does_not_act_is_refused_before_anything_moves(
    tmp_path: Path, broken: str
) -> None:
    control: Any = Bench(tmp_path).control
    control.test_stop()
    if broken == "button":
        control._check_emergency_stop = lambda now: None
    else:
        control.chain.__class__ = Forgetful
    with pytest.raises(DriverError, match="stop test failed"):
        control.test_stop()


def test_a_stop_that_was_pressed_before_is_not_cleared_by_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.there.estop.press()
    bench.control.test_stop()
    bench.run(1)
    assert bench.mode == Mode.ESTOP


class Halted:
    """Counts how often a driver's own controller was told to stop."""

    def __init__(self, control: Any) -> None:
        self.count = 0
        self.halt, control.driver.halt = control.driver.halt, self

    def __call__(self) -> StopCategory:
        self.count += 1
        return self.halt()


def test_a_stop_that_the_arm_follows_is_not_given_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.moving()
    halted = Halted(bench.control)
    bench.ask(Command.ESTOP)
    bench.run(200)
    assert bench.mode == Mode.ESTOP and halted.count == 0 and bench.control.in_order


@pytest.mark.parametrize("why", ["away", "unheard", "no number"])
def test_a_stop_that_the_arm_does_not_follow_is_given_up_once(
    tmp_path: Path, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(tmp_path)
    bench.moving()
    control: Any = bench.control
    halted, read = Halted(control), control.driver.read

    def wrong() -> ArmState:
        if why == "unheard":
            raise DriverError("the cable is gone")
        arm = read()
        return ArmState(arm.q + (1.0 if why == "away" else np.nan), arm.dq, arm.tau, arm.t)

    control.driver.read = wrong
    bench.ask(Command.ESTOP)
    bench.run(40)
    if why == "away":  # the set-point yields to where the arm says that it is: it flees further
        control.driver.read = lambda: ArmState(
            control.chain.limiter.q + 1.0, np.zeros(7), np.zeros(7), bench.now
        )
    bench.run(200)
    assert bench.mode == Mode.ESTOP and halted.count == 1 and not control.in_order
    said = capfd.readouterr().err
    assert said.count("did not follow its stop") == 1 and "(category 2)" in said
    if why == "no number":
        assert bench.ask(Command.RESET) == Mode.ESTOP, "from where should it go on?"
    control.driver.read = read
    bench.run(400)
    assert bench.ask(Command.RESET) == Mode.IDLE and control.in_order
    bench.run(50)
    assert bench.mode == Mode.IDLE
    assert bench.sent[-1] == pytest.approx(control.arm.q, abs=0.05), "from where it stands"


def test_a_ur_that_is_not_heard_any_more_gets_a_protective_stop(tmp_path: Path) -> None:
    """A wire of which one way is broken: it still takes commands."""
    limits = deployment("ur_sim", tmp_path).limits
    fresh = Fresh(FreshConfig(hold=0.3, stop=0.3, state=0.3))
    chain = Chain([Finite(), fresh, Enabled(), Tracking(limits)], Limiter(limits, 0.008))
    with FakeUR() as fake:
        arm = UR(Config(fake.host, 125.0, watchdog=10.0, silence=0.2, patience=60.0))
        channels = Channels.make(tmp_path, 6, len(chain.names))
        control = control_loop(arm, chain, follower(), channels)
        control.connect()
        fake.mute = True

        def halted() -> bool:
            control.turn()
            return fake.halted == PROTECTIVE

        wait_until(halted, "a protective stop")
        assert control.mode == Mode.ESTOP and "nothing heard" in control.fault
        fake.mute = False
        control._reset()  # pyright: ignore[reportPrivateUsage]
        assert control.mode == Mode.IDLE and not fake.bits & 0x4
        arm.close()
