"""Deadlines by a clock that the test moves."""

from __future__ import annotations

import os
import time

import pytest

from embodied.real_robot.kernel.rate import Rate, ahead_of_others
from tests.builders import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(100.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds + 0.001  # it always wakes a little late

    monkeypatch.setattr(time, "sleep", sleep)
    return clock


def test_deadlines_do_not_drift(clock: Clock) -> None:
    rate = Rate(100, clock=clock)
    for k in range(1, 51):
        clock.now += 0.004  # what a turn takes
        assert rate.wait() == pytest.approx(100 + k * 0.01)
        assert rate.late == pytest.approx(0.001)
    assert (rate.ticks, rate.missed) == (50, 0)


@pytest.mark.parametrize(("hertz", "awake"), [(100, 3e-4), (1000, 1e-4)])
def test_who_spins_sleeps_less(monkeypatch: pytest.MonkeyPatch, hertz: int, awake: float) -> None:
    now, slept = [100.0], []

    def ticking() -> float:
        now[0] += 1e-6  # a look at it takes that long
        return now[0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    rate = Rate(hertz, spin=True, clock=ticking)
    rate.wait()
    assert now[0] >= rate.deadline, "it spins until then"
    assert slept == [pytest.approx(1 / hertz - awake, abs=3e-6)]
    assert 0 <= rate.late < 3e-6


def test_a_stall_skips_deadlines_and_counts_them(clock: Clock) -> None:
    rate = Rate(100, clock=clock)
    rate.wait()
    clock.now = 100 + 0.0452
    assert rate.wait() == pytest.approx(100.04)
    assert rate.missed == 2 and rate.late == pytest.approx(0.0052)
    assert rate.wait() == pytest.approx(100.05), "and goes on with the next, without a burst"
    assert rate.missed == 2 and rate.worst == pytest.approx(0.0052) and rate.late < rate.worst


@pytest.mark.parametrize("periods", [1, 2])
def test_as_many_deadlines_are_skipped_as_went_by(clock: Clock, periods: int) -> None:
    rate = Rate(64, clock=clock)
    assert rate.deadline == 100.0
    clock.now = 100 + (periods + 1.5) / 64
    assert rate.wait() == 100 + (periods + 1) / 64 and rate.missed == periods
    clock.now = 100 + (periods + 2) / 64
    assert rate.wait() == clock.now and rate.late == 0, "in time: it does not sleep"
    assert (rate.ticks, rate.missed) == (2, periods)
    rate.begin()
    assert (rate.start, rate.deadline) == (clock.now, clock.now)
    assert (rate.ticks, rate.missed, rate.late, rate.worst) == (0, 0, 0.0, 0.0)


def test_who_does_not_spin_does_not_wait_for_a_short_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], []

    def ticking() -> float:
        now[0] += 1e-6
        return now[0]

    monkeypatch.setattr(time, "sleep", slept.append)  # and wakes at once
    rate = Rate(100, clock=ticking)
    rate.wait()
    assert slept == [pytest.approx(0.01, abs=3e-6)] and now[0] < 100.0001 and rate.late == 0
    Rate(0.5)
    for hertz in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="above 0"):
            Rate(hertz)


def test_a_clock_that_goes_back_is_not_waited_for(clock: Clock) -> None:
    rate = Rate(100, clock=clock)
    rate.wait()
    clock.now -= 3600
    before = clock.now
    rate.wait()
    assert clock.now - before == pytest.approx(0.01 + 0.001)


def test_priority_is_had_or_not_and_given_back() -> None:
    before = os.sched_getscheduler(0)
    with ahead_of_others() as granted:
        fifo = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO
        assert fifo == granted
    assert os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == before


@pytest.mark.parametrize("granted", [True, False])
def test_real_time_priority_is_asked_for_and_not_inherited(
    monkeypatch: pytest.MonkeyPatch, granted: bool
) -> None:
    calls: list[tuple[int, int, int]] = []

    def schedule(pid: int, policy: int, param: os.sched_param) -> None:
        if not granted:
            raise PermissionError
        calls.append((pid, policy, param.sched_priority))

    monkeypatch.setattr(os, "sched_setscheduler", schedule)
    with ahead_of_others() as had:
        assert had == granted
    first, last = (0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, 50), (0, os.SCHED_OTHER, 0)
    assert calls == ([first, last] if granted else [])


def test_a_real_loop_keeps_its_count() -> None:
    rate = Rate(200)
    began = time.monotonic()
    while time.monotonic() - began < 0.5:
        rate.wait()
    assert rate.ticks + rate.missed == pytest.approx(100, abs=2)
