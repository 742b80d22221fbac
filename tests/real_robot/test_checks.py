"""Each stage of the kernel at the edge of what it allows, and the chain's own book-keeping."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from embodied.core.build import ConfigError
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.chain import Chain, Stage, Tick
from embodied.real_robot.kernel.checks import (
    DaemonAlive,
    Enabled,
    Finite,
    Fresh,
    FreshConfig,
    Heartbeat,
    HoldToRun,
    Silence,
    Torque,
    TorqueRate,
    Tracking,
)
from embodied.real_robot.kernel.limiter import Limiter
from tests.real_robot.test_chain import DT, LIMITS, START, arm

NAN, INF = math.nan, math.inf
SHORT = Limits((0.0,), (1e-3,), (0.0,), (1e-5,), (1e-7,), (1.0,), (1.0,), (1.0,))
LONG = Limits((0.0,), (1000.0,), (0.0,), (1.0,), (1.0,), (1.0,), (1.0,), (1.0,))


def asked(
    stage: Stage,
    q: Floats = START,
    state: ArmState | None = None,
    now: float = 0.0,
    seen: float | None = None,
    **more: Any,
) -> Tick:
    """The tick after `stage` looked at a command `q` [n], without a begin before it."""
    state = arm(t=now) if state is None else state
    made = Tick(q.copy(), START, state, now if seen is None else seen, now, **more)
    stage(made)
    return made


def test_a_tick_asks_for_nothing_and_its_first_fault_stays() -> None:
    made = Tick(START, START, arm(), 0.0, 0.0)
    assert (made.hold, made.fault, made.stiffness, made.guided, made.back) == (
        *(False, "", None, False, None),
    )
    made.fail("one")
    made.fail("two")
    assert made.fault == "one"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("joint", [0, 1])
def test_one_number_that_is_not_finite_is_enough(value: float, joint: int) -> None:
    bad = START.copy()
    bad[joint] = value
    for state in (replace(arm(), q=bad), replace(arm(), dq=bad)):
        assert asked(Finite(), state=state).fault == "a measurement is not a finite number"
    made = asked(Finite(), bad)
    assert made.fault == "a command is not a finite number" and (made.q == START).all()
    assert not asked(Finite()).fault


@pytest.mark.parametrize(
    ("config", "right"),
    [
        *((dict(hold=0.5, stop=0.5, state=0.5), True), (dict(hold=0.0), False)),
        *((dict(hold=2.5), False), (dict(stop=INF), False), (dict(hold=NAN), False)),
        *((dict(state=0.0), False), (dict(state=INF), False), (dict(state=NAN), False)),
        *((dict(frozen=0, pause=0.0), True), (dict(frozen=-1), False), (dict(frozen=9), True)),
        *((dict(pause=-0.5), False), (dict(pause=INF), False), (dict(pause=0.5), True)),
    ],
)
def test_ages_that_would_switch_the_check_off_are_refused(
    config: dict[str, Any], right: bool
) -> None:
    config = {"hold": 1.0, "stop": 2.0, "state": 0.5, **config}
    if right:
        FreshConfig(**config)
        return
    with pytest.raises(ConfigError, match=r"safety\.fresh"):
        FreshConfig(**config)


def fresh(**changed: Any) -> Fresh:
    return Fresh(FreshConfig(**{"hold": 0.25, "stop": 0.5, "state": 0.25, **changed}))


def test_ages_at_their_limits() -> None:
    for seen, hold, fault in (
        *((9.75, False, ""), (9.74, True, ""), (9.5, True, ""), (9.49, True, "0.510 s old")),
        *((10.25, False, ""), (10.26, False, "0.260 s from the future")),
    ):
        made = asked(fresh(), seen=seen, now=10.0)
        assert made.hold == hold and fault in made.fault and bool(fault) == bool(made.fault), seen
    for t, fault in ((9.75, ""), (9.74, "0.260 s ago"), (10.25, ""), (10.26, "-0.260 s ago")):
        made = asked(fresh(), state=arm(t=t), now=10.0)
        assert fault in made.fault and bool(fault) == bool(made.fault), t
    assert asked(fresh(), hold=True, now=10.0).hold, "another stage asked for it"


def test_measurements_may_come_twice_but_not_backwards() -> None:
    stage = fresh(state=9.0)
    for t, fault in ((1.0, ""), (2.0, ""), (2.0, ""), (1.5, "older than the one before")):
        made = asked(stage, state=arm(t=t), now=2.0)
        assert fault in made.fault and bool(fault) == bool(made.fault), t


def test_repeats_and_pauses_are_faults_only_where_that_is_asked_for() -> None:
    usual = fresh()
    for now in (0.0, 0.25, 3.0, 9.0):
        assert not asked(usual, now=now).fault, "a pause, and the same measurement"
    stage = fresh(pause=0.5)
    for now, fault in ((1.0, ""), (1.5, ""), (2.25, "paused for 0.750 s"), (2.75, "")):
        made = asked(stage, now=now)
        assert fault in made.fault and bool(fault) == bool(made.fault), now
    stage = fresh(frozen=2)
    moved = arm(START + 1e-12)
    for state, fault in (
        *((arm(), ""), (arm(), ""), (moved, ""), (moved, ""), (moved, "in 2 ticks")),
    ):
        made = asked(stage, state=state)
        assert fault in made.fault and bool(fault) == bool(made.fault)


def test_a_daemon_may_be_silent_for_a_quarter_of_a_second() -> None:
    """And for two, until the stop is latched; without a daemon that is watched, for ever."""
    for hold, stop in ((0.0, 2.0), (2.5, 2.0), (0.5, INF), (NAN, 2.0), (0.5, NAN)):
        with pytest.raises(ConfigError, match="heartbeat"):
            Heartbeat(hold, stop)
    Heartbeat(0.5, 0.5)
    stage = DaemonAlive(Heartbeat())
    made = asked(stage, now=99.0)
    assert not made.hold and not made.fault and not stage.speaks(99.0)
    stage.watched = True
    stage.silence.hear(1, 10.0, 10.0)
    for now, hold, fault in (
        *((10.25, False, ""), (10.26, True, ""), (12.0, True, "")),
        (12.01, True, "the daemon has not answered for 2.0 s"),
    ):
        made = asked(stage, now=now)
        assert (made.hold, made.fault) == (hold, fault), now
        assert stage.speaks(now) == (not hold)
    assert asked(stage, now=10.0, hold=True).hold


def test_a_hand_may_be_silent_for_a_quarter_of_a_second() -> None:
    stage = HoldToRun()
    assert asked(stage, now=0.0).hold, "nobody has held it yet"
    stage.silence.hear(1, 10.0, 10.0)
    for now, hold in ((10.0, False), (10.25, False), (10.26, True)):
        made = asked(stage, now=now)
        assert made.hold == hold and stage.held(now) == (not hold) and not made.fault, now
    assert asked(stage, now=10.0, hold=True).hold


def test_a_beat_is_a_new_count_and_its_clock_makes_it_only_older() -> None:
    silence = Silence()
    for count, sent, now, silent in (
        *((0, 5.0, 5.0, INF), (1, 5.0, 5.0, 0.0), (1, 8.0, 8.0, 3.0), (2, 7.0, 9.0, 2.0)),
        *((3, 99.0, 10.0, 0.0), (4, NAN, 11.0, INF), (5, 12.0, 12.0, 0.0), (6, INF, 12.0, INF)),
    ):
        silence.hear(count, sent, now)
        assert silence(now) == silent, count


def test_an_arm_is_enabled_only_by_somebody() -> None:
    stage = Enabled()
    assert asked(stage).hold
    stage.on = True
    assert not asked(stage).hold and asked(stage, hold=True).hold


def test_torque_names_the_joint_that_is_furthest_above_its_limit() -> None:
    def measured(*tau: float) -> ArmState:
        return arm(tau=np.array(tau))

    for tau, fault in (((10.0, -5.0), False), ((10.5, 7.0), True), ((0.0, 5.1), True)):
        stage = Torque(LIMITS)
        faults = [asked(stage, state=measured(*tau)).fault for _ in range(4)]
        assert [bool(each) for each in faults] == [False, False, fault, fault]
        assert not fault or f"joint 1 measures {tau[1]:.1f} N m, its limit is 5.0" in faults[2]
    stage = Torque(LIMITS)
    for ticks in (2, 2):
        stage.begin(arm())
        assert not any(asked(stage, state=measured(11.0, 0.0)).fault for _ in range(ticks))


def test_a_change_of_torque_counts_over_three_ticks() -> None:
    for most in ((1.0, 0.0), (1.0, INF), (1.0, NAN), (0.0, 1.0)):
        with pytest.raises(ConfigError, match="torque_rate"):
            TorqueRate(most, DT)

    def faults(stage: TorqueRate, *taus: tuple[float, float]) -> list[str]:
        return [asked(stage, state=arm(tau=np.array(tau))).fault for tau in taus]

    for step, fault in ((0.25, False), (0.26, True)):  # 1 N m/s, in ticks of 0.25 s
        stage = TorqueRate((9.0, 1.0), 0.25)
        stage.begin(arm(tau=np.array([7.0, 5.0])))
        found = faults(stage, *[(7.0, 5.0 + k * step) for k in (1, 2, 3, 4, 5, 6, 7)])
        assert [bool(each) for each in found] == [False, False, *[fault] * 5]
        assert not fault or "the torque of joint 1 changed by 1 N m/s, at most 1" in found[-1]
    stage = TorqueRate((0.5, 16.0), 0.25)
    stage.begin(arm())
    assert "joint 0" in faults(stage, (0.6, 13.0))[0], "for its own limit"


def test_an_arm_that_is_not_where_it_was_sent() -> None:
    stage = Tracking(replace(LIMITS, tracking=(0.5, 2.0)))
    assert not asked(stage, state=arm(START + np.array([0.5, 2.0]))).fault
    assert (
        "joint 0 is 0.750 from where"
        in asked(stage, state=arm(START + np.array([0.75, 1.5]))).fault
    )
    assert (
        "joint 1 is 2.250 from where"
        in asked(stage, state=arm(START - np.array([0.0, 2.25]))).fault
    )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (dict(high=(1.0,)), "limits.high should be 2 finite"),
        (dict(tracking=(0.5, NAN)), "limits.tracking should be 2 finite"),
        (dict(torque=(0.0, 5.0)), "limits.torque should be above 0"),
        (dict(velocity=(2.0, 0.0)), "limits.velocity should be above 0"),
        (dict(margin=(-0.1, 0.0)), "limits: low"),
        (dict(margin=(1.0, 0.0)), "limits: low"),
        (dict(low=(-1.0, 3.0)), "limits: low"),
        (dict(velocity=(1e-3, 1.0)), "limits: range / velocity"),
        (dict(acceleration=(1e-3, 5.0)), "limits: range / velocity"),
        (dict(jerk=(5e-3, 100.0)), "limits: range / velocity"),
        (dict(velocity=(4e7, 1.0), acceleration=(4e7, 5.0), jerk=(4e7, 1.0)), "limits: range"),
        (dict(acceleration=(4e7, 5.0), jerk=(4e7, 100.0)), "limits: range / velocity"),
        (dict(jerk=(2e8, 100.0)), "limits: range / velocity"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        replace(LIMITS, **changed)


def test_limits_as_wide_and_as_narrow_as_they_may_be() -> None:
    """Times of motions from 1e-7 to 1000 s, to the last bit."""
    assert len(replace(LIMITS)) == 2 and len(replace(SHORT)) == len(replace(LONG)) == 1
    quick = dict(velocity=(2e6, 1.0), acceleration=(2e12, 5.0), jerk=(2e18, 100.0))
    for changed in (
        *(quick, dict(torque=(0.5, 5.0), velocity=(0.5, 1.0)), dict(tracking=(0.5, 1e-3))),
        *(dict(jerk=(1e7, 100.0)), dict(margin=(0.99, 0.0))),
    ):
        replace(LIMITS, **changed)


class Nudge:
    """Moves a target by `step` [n], and remembers what it was asked."""

    name: ClassVar[str] = "workspace"

    def __init__(self, *step: float, **tick: Any) -> None:
        self.step, self.tick, self.begun = np.array(step), tick, 0

    def begin(self, arm: ArmState) -> None:
        self.begun += 1

    def __call__(self, tick: Tick) -> None:
        self.wanted = tick.q.copy()
        tick.q += self.step
        for name, value in self.tick.items():
            setattr(tick, name, value)

    def check(self, springs: object) -> None:
        raise ConfigError(f"no springs: {springs}")


def nudged(*stages: Stage, at: Floats = START) -> Chain:
    made = Chain(stages, Limiter(LIMITS, DT))
    made.begin(arm(at))
    return made


def test_what_each_stage_moved_is_counted() -> None:
    at = np.array([0.0, 1.0])
    enabled, hand, nudge = Enabled(), HoldToRun(), Nudge(-0.2, 0.1)
    enabled.on = True
    hand.silence.hear(1, 0.0, 0.0)
    made = nudged(nudge, enabled, hand, at=at)
    sent = made(np.array([0.5, 1.5]), 0.0, arm(at), 0.0)
    assert made.changed[:3].tolist() == pytest.approx([0.0, 0.0, 0.2], abs=1e-12)
    assert made.changed[3] == pytest.approx(0.6 - (sent[1] - 1.0), abs=1e-12)
    assert made.counts.tolist() == [0, 0, 1, 1]
    enabled.on = False
    made(np.array([0.5, 1.5]), 0.0, arm(at), 9.0)
    assert made.counts.tolist() == [1, 0, 2, 1], "who began to hold, not who holds as well"
    made.begin(arm(at))
    assert not made.changed.any() and nudge.begun == 2
    for step, count in ((1e-9, 0), (1e-8, 1)):
        made = nudged(Nudge(step, 0.0), at=at)
        made(at, 0.0, arm(at), 0.0)
        assert made.counts[0] == count, "rounding is not counted"


def test_the_first_fault_stays_with_its_way_back() -> None:
    nudge = Nudge(0.0, 0.0, fault="one", back=START, stiffness=START)
    made = nudged(nudge)
    made(START, 0.0, arm(), 0.0)
    assert made.fault == "one" and made.back is START and made.stiffness is START
    nudge.tick = {"fault": "two", "back": -START}
    made(START, 0.0, arm(), 0.0)
    assert made.fault == "one" and made.back is None and made.stiffness is None
    nudge.tick = {}
    assert (made(START + 0.1, 0.0, arm(), 0.0) == START).all() and made.fault == "one"
    made.aim = START + 0.1
    for _ in range(200):
        sent = made(START, 0.0, arm(), 0.0)
    assert sent == pytest.approx(START + 0.1, abs=1e-6), "it yields to where it is aimed"
    made.clear()
    made(START, 0.0, arm(), 0.0)
    assert not made.fault


def test_a_target_of_another_shape_is_no_target() -> None:
    nudge = Nudge(0.0, 0.0)
    made = nudged(nudge)
    made(START + 0.1, 0.0, arm(), 0.0)
    assert (nudge.wanted == START + 0.1).all()
    before = made.limiter.q.copy()
    made(np.zeros(3), 0.0, arm(), 0.0)
    assert (nudge.wanted == before).all() and "shape (3,) for 2 joints" in made.fault


def test_stages_that_count_on_springs_are_asked() -> None:
    with pytest.raises(ConfigError, match="no springs: None"):
        nudged(Finite(), Nudge(0.0, 0.0)).check(None)
    nudged(Finite()).check(None)
    with pytest.raises(ConfigError, match="no stage 'enabled'"):
        nudged(Finite()).required(Enabled)


def test_a_chain_begins_where_the_arm_is_and_its_stages_with_it() -> None:
    made = nudged(Finite())
    for at in ([0.5, 1.5], [-0.5, 0.5]):
        made.begin(arm(np.array(at)))
        assert made.limiter.q.tolist() == at and made.resting and not made.guided
