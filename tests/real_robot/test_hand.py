"""The hand is a part of the safety chain: its limits, and what it does at every stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from embodied.core.build import ConfigError, allow
from embodied.real_robot.assemble import build_driver
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.hand import REST_FORCE, SETTLED, Config, Grasp, HandLimiter
from embodied.real_robot.kernel.messages import Command, Mode
from tests.real_robot.long_run import ROBOTS
from tests.real_robot.test_control import DT, Bench

CLOSE = np.array([0.0, 0.0, 0.0, -1.0])
TICKS = round(0.3 / DT)  # after a stop, in which the force has to fall
SECOND = round(1 / DT)


def limits(at_stop: Any = "hold", **changed: Any) -> Config:
    return Config(**{"high": 0.08, "speed": 0.2, "force": 35.0, "at_stop": at_stop, **changed})


class Gripping(Bench):
    """A hand that closes; `force` [ticks] is what a jaw presses with on what is between, N, and
    `width` [ticks] its measured opening, m."""

    def __init__(self, folder: Path, at_stop: str = "hold", thick: float = 0.02) -> None:
        allow("tests")
        world = {"_target_": "tests.real_robot.jaws.Jaws", "thick": thick}
        hand = HandLimiter(limits(at_stop), DT)
        super().__init__(folder, hand, world=world)  # pyright: ignore[reportArgumentType]
        self.force: list[float] = []
        self.width: list[float] = []
        self.action = CLOSE
        self.run(10)
        assert self.ask(Command.ARM) == Mode.ARMED
        self.run(10)
        assert self.ask(Command.START) == Mode.RUNNING

    def run(self, turns: int) -> None:
        for _ in range(turns):
            super().run(1)
            self.force.append(float(self.driver.sense()[0]))
            self.width.append(float(self.driver.data.qpos[self.driver.fingers].sum()))

    def until(self, so: Callable[[], bool]) -> None:
        for _ in range(3 * SECOND):
            if so():
                return
            self.run(1)
        raise AssertionError("never so")


def fail(bench: Gripping) -> None:
    """A mistake in the control process: its last resort brakes."""
    bench.control.source.follower.controller = None  # pyright: ignore[reportAttributeAccessIssue]


STOPS: dict[str, Callable[[Gripping], object]] = {
    "estop": lambda bench: bench.here.estop.press(),
    "not a number": lambda bench: setattr(bench, "action", CLOSE * np.nan),
    "internal error": fail,
}


def stopped(bench: Gripping, stop: str) -> int:
    """The number of the tick in which it latched."""
    STOPS[stop](bench)
    bench.until(lambda: bench.mode == Mode.ESTOP)
    return len(bench.width)


@pytest.mark.parametrize("stop", STOPS)
def test_a_hand_that_is_closing_closes_no_further(tmp_path: Path, stop: str) -> None:
    """P-1: it went on from 71 to 34 mm."""
    bench = Gripping(tmp_path, thick=0.0)
    bench.until(lambda: bench.width[-1] < 0.05)
    latched = stopped(bench, stop)
    bench.run(3 * SECOND)
    assert bench.width[latched] > 0.02
    assert min(bench.width[latched:]) > bench.width[latched - 1] - 0.003, "its own momentum"
    assert np.ptp(bench.width[latched + SECOND :]) < 1e-4


@pytest.mark.parametrize("stop", STOPS)
def test_a_finger_between_the_jaws_is_let_go_of(tmp_path: Path, stop: str) -> None:
    bench = Gripping(tmp_path)
    bench.until(lambda: max(bench.force, default=0.0) > 2 * REST_FORCE)
    latched = stopped(bench, stop)
    bench.run(5 * SECOND)
    assert max(bench.force[latched + TICKS :]) < REST_FORCE, max(bench.force[latched:])
    if stop == "estop":
        before = len(bench.force)
        assert bench.ask(Command.RESET) == Mode.IDLE
        assert bench.ask(Command.ARM) == Mode.ARMED
        bench.run(SECOND)
        assert max(bench.force[before:]) < REST_FORCE, "nor after a reset"


@pytest.mark.parametrize("stop", STOPS)
def test_what_was_held_before_the_stop_stays_held(tmp_path: Path, stop: str) -> None:
    """100 g, also after a reset; where it is taken out, the jaws close no further."""
    bench = Gripping(tmp_path)
    bench.until(lambda: max(bench.force, default=0.0) > 2 * REST_FORCE)
    bench.run(round((SETTLED + 0.2) / DT))
    bar = bench.driver.model.body("bar").id
    bench.driver.data.xfrc_applied[bar, 2] = -0.1 * 9.81
    stopped(bench, stop)
    bench.run(2 * SECOND)
    assert bench.width[-1] == pytest.approx(0.02, abs=2e-3)
    if stop == "internal error":  # nothing is measured any more
        assert 2.0 < bench.force[-1] <= REST_FORCE + 0.5
        return
    assert bench.force[-1] > REST_FORCE
    if stop == "estop":
        assert bench.ask(Command.RESET) == Mode.IDLE
        assert bench.ask(Command.ARM) == Mode.ARMED
        bench.run(SECOND)
        assert bench.force[-1] > REST_FORCE, "nothing was let fall"
        bench.here.estop.press()
        bench.run(10)
    at = bench.driver.model.joint("bar").qposadr[0]
    bench.driver.data.qpos[at] += 0.3
    bench.run(2 * SECOND)
    assert bench.width[-1] > 0.018


def test_it_opens_or_goes_limp_where_that_is_said(tmp_path: Path) -> None:
    for at_stop in ("open", "limp"):
        (tmp_path / at_stop).mkdir()
        bench = Gripping(tmp_path / at_stop, at_stop)
        bench.until(lambda: max(bench.force, default=0.0) > 2 * REST_FORCE)  # noqa: B023
        latched = stopped(bench, "estop")
        bench.run(SECOND)
        assert max(bench.force[latched + TICKS :]) < 0.5
        assert (bench.width[-1] > 0.075) == (at_stop == "open")


def test_a_plain_stop_ends_the_closing_too(tmp_path: Path) -> None:
    bench = Gripping(tmp_path, thick=0.0)
    bench.until(lambda: bench.width[-1] < 0.05)
    bench.ask(Command.STOP)
    before = bench.width[-1]
    bench.run(SECOND)
    assert bench.mode == Mode.IDLE and bench.width[-1] > before - 0.003


def test_the_target_stays_within_its_limits() -> None:
    hand = HandLimiter(limits(low=0.01, high=0.07), DT)
    hand.begin(0.04)
    random = np.random.default_rng(0)
    before = hand.width
    for wanted in random.uniform(-1, 1, 500):
        sent = hand.move(float(wanted), before)
        assert abs(sent - before) <= 0.2 * DT + 1e-12 and 0.01 <= sent <= 0.07
        before = sent
    assert hand.stay(np.nan, latched=True) == pytest.approx(before, abs=0.2 * DT + 1e-9)


def saw(grasp: Grasp, *seen: tuple[float, float, float]) -> list[bool]:
    """Whether it is held after each of (measured, target, now)."""
    return [grasp.see(*each) or grasp.held for each in seen]


def test_a_hand_holds_what_it_has_stood_still_on_for_half_a_second() -> None:
    still = [(0.02, 0.0, now) for now in (10.0, 10.1, 10.49, 10.5)]
    assert saw(Grasp(), *still) == [False, False, False, True]
    for width, target, holds in (
        *((0.002, 0.0, False), (0.0021, 0.0, True), (0.02, 0.02, False), (0.02, 0.0179, True)),
    ):
        steps = [(width, target, now) for now in (10.0, 10.5, 11.0)]
        assert saw(Grasp(), *steps)[-1] == holds, (width, target)
    for moved, holds in ((5e-4, True), (6e-4, False), (0.03, False), (-5e-4, True)):
        assert saw(Grasp(), (0.0, -0.1, 0.0), (moved, -0.1, 0.5))[-1] == holds, moved
    for after, target, holds in (
        *((0.019, 0.0, True), (0.0181, 0.0, True), (0.02 - 0.002, 0.0, False)),
        *((0.017, 0.0, False), (0.02, 0.0181, False), (0.02, 0.0179, True), (0.03, 0.0, True)),
    ):
        grasp = Grasp()
        assert saw(grasp, *still)[-1]
        assert saw(grasp, (after, target, 10.6)) == [holds], (after, target)


def hand_at(width: float, at_stop: str = "hold", **changed: Any) -> HandLimiter:
    made = HandLimiter(limits(at_stop, **changed), DT)
    assert made.begin(width) == width
    return made


def holding() -> HandLimiter:
    """Its jaws have pressed on something 20 mm thick for a second."""
    made = hand_at(0.02)
    for _ in range(SECOND):
        made.move(0.0, 0.02)
    assert made.width == pytest.approx(0.0, abs=1e-12) and made.grasp.held
    return made


def test_a_hand_at_rest_follows_who_opens_it_and_not_what_closes_it() -> None:
    hand = hand_at(0.04)
    stays = [hand.stay(measured, latched=False) for measured in (0.0405, 0.04, 0.0414, 0.0416)]
    assert stays == [0.0405, 0.0405, 0.0405, 0.0416] and hand.force == 10.0
    hand.move(0.0, 0.03)
    assert hand.force == 35.0 and hand.width < 0.0416
    assert hand.stay(0.03, latched=True) == 0.03, "anew after it moved"
    hand.begin(0.0295)
    assert hand.stay(0.03, latched=True) == 0.03, "and after it began"
    hand = HandLimiter(limits(), DT)
    assert [hand.stay(each, False) for each in (0.0, 0.001, 0.0011)] == [0.0, 0.0, 0.0011]
    assert HandLimiter(limits(), DT).stay(5e-4, False) == 5e-4
    assert hand.stay(np.nan, latched=False) == 0.0011
    weak = hand_at(0.04, force=5.0)
    weak.stay(0.04, latched=True)
    assert weak.force == 5.0


def test_a_hand_that_holds_something_keeps_its_force_until_it_is_gone() -> None:
    hand = holding()
    for measured in (0.02, 0.0195, 0.02):
        assert hand.stay(measured, latched=True) == pytest.approx(0.0, abs=1e-12)
        assert hand.force == 35.0
    assert hand.begin(0.02) == pytest.approx(0.0, abs=1e-12), "a reset lets nothing fall"
    hand.stay(0.02, latched=False)
    assert hand.stay(0.01, latched=False) == 0.02, "gone: it closes no further"
    assert hand.force == 10.0 and not hand.grasp.held
    hand = hand_at(0.02)
    for _ in range(SECOND // 5):
        hand.move(0.0, 0.02)
    assert hand.stay(0.02, latched=True) == 0.02 and hand.force == 10.0, "a finger, a moment ago"


def test_what_a_hand_does_at_a_latched_stop_only() -> None:
    for at_stop, width, force in (
        *(("hold", 0.03, 10.0), ("limp", 0.03, 0.0), ("open", 0.03 + 0.2 * DT, 35.0)),
    ):
        hand = hand_at(0.03, at_stop)
        assert hand.stay(0.03, latched=False) == 0.03 and hand.force == 10.0, "a plain stop"
        assert hand.stay(0.03, latched=True) == pytest.approx(width) and hand.force == force
        after = [hand.stay(each, latched=True) for each in (0.02, 0.025)]
        expected = {"hold": [0.03, 0.03], "limp": [0.02, 0.025]}
        assert at_stop == "open" or after == expected[at_stop]
    for _ in range(SECOND):
        hand.stay(0.03, latched=True)
    assert hand.width == 0.08, "wide open, and not further"
    with pytest.raises(ConfigError, match="should be below"):
        limits(low=0.08)


def test_a_width_that_is_no_number_is_a_fault(tmp_path: Path) -> None:
    bench = Gripping(tmp_path, thick=0.0)
    bench.run(20)
    follower: Any = bench.control.source.follower
    step_end = follower._advance

    def advance(step: int, q: np.ndarray) -> None:
        step_end(step, q)
        follower.width = float("nan")

    follower._advance = advance
    bench.run(20)
    assert bench.mode == Mode.ESTOP and "hand" in bench.fault
    assert np.isfinite(bench.width).all()


def test_a_robot_with_a_hand_needs_its_limits() -> None:
    node = yaml.safe_load((ROBOTS / "sim.yaml").read_text()) | {"policy": ""}
    node.pop("_target_")
    node["driver"].pop("world")
    for hand, reason in (
        (None, "its limits are not set"),
        ({**node["hand"], "force": 0.0}, "above 0"),
        ({**node["hand"], "low": 0.09}, "should be below"),
        ({k: v for k, v in node["hand"].items() if k != "at_stop"}, "at_stop"),
    ):
        with pytest.raises(ConfigError, match=reason) as refused:
            build_driver(Deployment.parse({**node, "hand": hand}))
        assert "\n" not in str(refused.value)
    build_driver(Deployment.parse(node))


def test_a_driver_is_told_once_and_again_after_it_was_connected() -> None:
    class Told:
        def __init__(self) -> None:
            self.forces: list[float] = []

        def limit_hand(self, speed: float, force: float) -> None:
            self.forces.append(force)
            if len(self.forces) == 1:
                raise DriverError("gone")

    hand, driver = HandLimiter(limits(), DT), Told()
    hand.begin(0.04)
    hand.move(0.0, 0.04)
    with pytest.raises(DriverError):
        hand.tell(driver)  # pyright: ignore[reportArgumentType]
    for _ in range(3):
        hand.move(0.0, 0.04)
        hand.tell(driver)  # pyright: ignore[reportArgumentType]
    assert driver.forces == [35.0], "a wire that is gone is not waited for in every tick"
    hand.stay(0.04, latched=True)
    hand.tell(driver)  # pyright: ignore[reportArgumentType]
    hand.forget()
    hand.tell(driver)  # pyright: ignore[reportArgumentType]
    assert driver.forces == [35.0, REST_FORCE, REST_FORCE]
