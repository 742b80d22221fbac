"""A source is not trusted: whatever it gives that is no set-point is latched, and the arm brakes
within its limits to rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.messages import Command, Mode
from embodied.real_robot.kernel.source import SetPoint, Source
from tests.real_robot.test_control import DT, Bench, within
from tests.tiers import usually


def test_a_set_point_says_no_more_than_it_was_given() -> None:
    """It comes from no observation, so it is as old as can be, and of no policy's step."""
    point = SetPoint(np.zeros(3))
    assert (point.width, point.seen, point.paused) == (0.0, -np.inf, 0.0)
    assert point.starved and not point.last and not point.intervened
    assert point.step == -1 and point.problem == "" and point.reference is None
    assert len(point.action) == 0


class Straight(Source):
    """Moves every joint at 0.2 rad/s; `spoil` may change what it says."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.spoil: Callable[[Straight], object] = lambda source: None
        self.point = SetPoint(np.zeros(7))

    def listen(self, now: float) -> None:
        self.point.seen = now

    def begin(self, q: Floats, width: float, now: float) -> None:
        self.point = SetPoint(q, width, now)

    def move(self, arm: ArmState, sent: Floats, now: float, slowed: bool) -> None:
        self.point.q = self.point.q + 0.2 * DT
        self.spoil(self)

    def late(self) -> None:
        self.bench.now += 0.6

    def fails(self) -> None:
        raise ValueError("no way\nout")


def put(name: str, value: Any) -> Callable[[Straight], object]:
    return lambda source: setattr(source.point, name, value)


SPOILT: dict[str, tuple[Callable[[Straight], object], str]] = {
    "nan": (put("q", np.full(7, np.nan)), "a command is not a finite number"),
    "infinite": (put("q", np.full(7, np.inf)), "a command is not a finite number"),
    "shape": (put("q", np.zeros(6)), "has ndarray of shape (6,) for the positions of 7 joints"),
    "kind": (put("q", np.zeros(7, object)), "for the positions of 7 joints"),
    "no positions": (put("q", None), "has NoneType for the positions of 7 joints"),
    "no set-point": (lambda source: setattr(source, "point", None), "gave NoneType"),
    "width": (put("width", np.nan), "a command of the hand is not a finite number"),
    "no width": (put("width", "wide"), "a set-point has str for its width"),
    "no time": (put("seen", None), "a set-point has NoneType for its seen"),
    "time": (put("seen", np.nan), "observation is nan s old"),
    "past": (put("seen", 1.0), "s old"),
    "future": (put("seen", 1e9), "from the future"),
    "problem": (put("problem", "the way is not free"), "the way is not free"),
    "late": (Straight.late, "a set-point took 0.60 s to make"),
    "raises": (Straight.fails, "ValueError: no way out (test_source.py:"),
    "stopped by hand": (lambda source: source.point.q.fill(1e300), ""),
}


@pytest.mark.parametrize("mode", usually([Mode.RUNNING], [Mode.RUNNING, Mode.HOMING]))
@pytest.mark.parametrize("name", SPOILT)
def test_what_is_no_set_point_is_a_latched_stop(tmp_path: Path, name: str, mode: Mode) -> None:
    bench = Bench(tmp_path)
    source = Straight(bench)
    bench.control.source = bench.control.homing = source
    bench.run(5)
    wishes = (Command.HOME,) if mode == Mode.HOMING else (Command.ARM, Command.START)
    assert [bench.ask(wish) for wish in wishes][-1] == mode
    bench.run(30)
    assert bench.mode == mode and np.ptp(np.stack(bench.sent), axis=0).min() > 0.03, "it moves"
    source.spoil, said = SPOILT[name]
    bench.run(4)
    source.spoil = lambda source: None
    if not said:  # a target that is far away is led to, within the limits
        bench.run(100)
        within(bench.sent)
        assert bench.mode == mode
        return
    assert bench.mode == Mode.ESTOP and said in bench.fault and "\n" not in bench.fault
    bench.run(100)
    within(bench.sent)
    assert np.ptp(np.stack(bench.sent[-20:]), axis=0).max() < 1e-9, "at rest"
    assert bench.ask(Command.ARM) == Mode.ESTOP and bench.refused
    source.point = SetPoint(np.zeros(7))
    assert bench.ask(Command.RESET) == Mode.IDLE and not bench.fault


def test_a_source_cannot_move_an_arm_that_it_was_not_asked_to(tmp_path: Path) -> None:
    """In IDLE and ARMED, and after a stop, its set-points go nowhere."""
    bench = Bench(tmp_path)
    source = bench.control.source = Straight(bench)
    bench.run(5)
    for wish in (Command.NOTHING, Command.ARM, Command.ESTOP):
        bench.ask(wish)
        source.point.q = source.point.q + 1.0
        bench.run(20)
    assert np.ptp(np.stack(bench.sent), axis=0).max() < 1e-9


def test_what_a_source_gets_is_a_copy_of_what_was_sent(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    source: Any = Straight(bench)
    source.move = lambda arm, sent, now, slowed: sent.fill(np.nan)
    bench.control.source = source
    bench.run(5)
    for wish in (Command.ARM, Command.START):
        bench.ask(wish)
    bench.run(5)
    assert bench.mode == Mode.RUNNING and np.isfinite(np.stack(bench.sent)).all()
