"""The safety chain: whatever is asked, nothing outside the limits is sent."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.core.build import ConfigError
from embodied.embodiments import fr3
from embodied.real_robot.assemble import build_chain
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.chain import Chain
from embodied.real_robot.kernel.checks import (
    Enabled,
    Finite,
    Fresh,
    FreshConfig,
    Torque,
    TorqueRate,
    Tracking,
)
from embodied.real_robot.kernel.limiter import Limiter
from embodied.real_robot.safety.workspace import Config as Box
from embodied.real_robot.safety.workspace import Workspace
from tests.real_robot.test_control import LIMITS as FR3
from tests.real_robot.test_daemon import simulated

DT = 0.005
N = 2
PLACES = {"low": (-1.0, 0.0), "high": (1.0, 2.0), "margin": (0.1, 0.0)}
MOTION = {"velocity": (2.0, 1.0), "acceleration": (10.0, 5.0), "jerk": (500.0, 100.0)}
LIMITS = Limits(**PLACES, **MOTION, torque=(10.0, 5.0), tracking=(0.5, 0.5))
START = np.array([0.0, 1.0])


def arm(q: Floats = START, t: float = 0.0, tau: Floats | None = None) -> ArmState:
    still = np.zeros(len(q))
    return ArmState(np.array(q, float), still, still.copy() if tau is None else tau, t)


def chain(*stages: object) -> Chain:
    made = Chain([Finite(), Enabled(), *stages], Limiter(LIMITS, DT))  # pyright: ignore[reportArgumentType]
    made.begin(arm())
    made.required(Enabled).on = True
    return made


def play(made: Chain, wishes: list[Floats]) -> Floats:
    """What is sent [T, n], the arm following at once."""
    sent = [START.copy()]
    for wish in wishes:
        sent.append(made(wish, 0.0, arm(sent[-1]), 0.0).copy())
    return np.stack(sent)


def within(sent: Floats, limits: Limits = LIMITS, dt: float = DT) -> None:
    """Every limit, of motions whose jerk is constant within a tick.

    Then q_{k+1} - 2 q_k + q_{k-1} and so on are averages of the derivatives, which are never larger
    than their largest value.
    """
    low, high, margin = (np.asarray(v) for v in (limits.low, limits.high, limits.margin))
    assert (sent >= low + margin - 1e-9).all() and (sent <= high - margin + 1e-9).all()
    v = np.diff(sent, axis=0) / dt
    a = np.diff(v, axis=0) / dt
    j = np.diff(a, axis=0) / dt
    for value, most in ((v, limits.velocity), (a, limits.acceleration), (j, limits.jerk)):
        assert (np.abs(value) <= np.asarray(most) * (1 + 1e-6) + 1e-6).all()


numbers = st.floats(allow_nan=True, allow_infinity=True, width=64)
wishes = st.lists(st.tuples(numbers, numbers, st.integers(1, 40)), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(wishes)
def test_nothing_outside_the_limits_is_ever_sent(parts: list[tuple[float, float, int]]) -> None:
    made = chain()
    asked = [np.array([x, y]) for x, y, times in parts for _ in range(times)]
    sent = play(made, [*asked, *[START] * 20])
    within(sent)
    bad = any(not (math.isfinite(x) and math.isfinite(y)) for x, y, _ in parts)
    assert bool(made.fault) == bad


def test_what_the_planner_rounds_does_not_lead_out() -> None:
    """From a state of a long run (seed 7) it met the limit 1.8e-9 rad too late."""
    limiter, now = Limiter(LIMITS, DT), [0.8701405348150533, 1.9999890864090468]
    limiter._set_state(
        now, [0.07014174101312856, 0.00369580623555039], [3.76395, -0.6900662092774654]
    )
    for k in range(20):  # another target of the other joint makes it plan again
        assert limiter(np.array([0.9 - 0.1 * (k % 2), 2.1]))[1] <= 2.0


@pytest.mark.parametrize("q", [0.5, 0.89199998])
def test_where_the_planner_fails_the_arm_goes_on(q: float) -> None:
    """From rest, over exactly 2 a^3 / j^2 = 0.008 rad, Ruckig 0.19 knows no motion; a long run
    (seed 7) met that where it was sent to its limit."""
    limiter = Limiter(LIMITS, DT)
    limiter.begin(np.array([q, 1.0]))
    goal = np.array([min(q + 0.008, 0.9), 1.0])
    sent = [np.array([q, 1.0]), *(limiter(goal).copy() for _ in range(60))]
    within(np.stack(sent))
    assert limiter.resting and sent[-1] == pytest.approx(goal, abs=1e-7)


@pytest.mark.parametrize("kind", ["jumps", "bangs", "noise", "late reversals"])
def test_adversaries_do_not_get_through(kind: str) -> None:
    random = np.random.default_rng(0)
    low, high = np.array([-9.0, -9.0]), np.array([9.0, 9.0])
    made, sent = chain(), [START.copy()]
    for k in range(4000):
        if kind == "jumps":
            wish = random.uniform(low, high)
        elif kind == "bangs":
            wish = high if (k // 37) % 2 else low
        elif kind == "noise":
            wish = sent[-1] + random.normal(0, 0.01, N)
        else:  # full speed at a limit, then away at the last moment
            wish = high if sent[-1][0] < 0.85 else low
        sent.append(made(wish, 0.0, arm(sent[-1]), 0.0).copy())
    within(np.stack(sent))
    assert not made.fault


def test_what_is_sent_and_what_is_not() -> None:
    """A target inside is reached exactly, one of another shape is a fault, and so is an arm that
    does not follow; one that is not enabled holds still."""
    made = chain()
    sent = play(made, [np.array([0.5, 1.5])] * 400)
    assert sent[-1].tolist() == pytest.approx([0.5, 1.5], abs=1e-12)
    assert made.resting and made.changed.tolist() == pytest.approx([0, 0, 0], abs=1e-12)
    made = chain()
    assert (made(np.zeros(3), 0.0, arm(), 0.0) == START).all()
    assert "shape (3,) for 2 joints" in made.fault
    made = chain()
    made.required(Enabled).on = False
    assert (play(made, [np.array([0.9, 2.0])] * 50) == START).all()
    assert not made.fault and made.counts[1] == 50
    made = Chain([Tracking(LIMITS), Finite(), Enabled()], Limiter(LIMITS, DT))
    assert made.names == ("finite", "enabled", "tracking", "limits"), "in an order of its own"
    made.begin(arm())
    for away, fault in ((0.49, ""), (0.51, "joint 1 is 0.510 from where it was sent")):
        made(START, 0.0, arm(START + np.array([0.0, away])), 0.0)
        assert fault in made.fault and bool(made.fault) == bool(fault)
    with pytest.raises(ConfigError, match="twice"):
        Chain([Finite(), Finite()], Limiter(LIMITS, DT))


def test_a_fault_brakes_within_the_limits_and_stays_until_it_is_cleared() -> None:
    made = chain()
    before = play(made, [np.array([0.9, 2.0])] * 60)
    sent = [before[-1].copy()]
    for wish in [np.array([np.nan, 0.0]), *[np.array([-0.5, 0.5])] * 200]:
        sent.append(made(wish, 0.0, arm(sent[-1]), 0.0).copy())
    assert made.fault == "a command is not a finite number"
    within(np.concatenate([before, sent[1:]]))
    assert made.resting and (sent[-1] == sent[-2]).all()
    # v^2 / 2a and the time that the jerk needs: it stops well before it would have turned round.
    assert sent[-1][0] > before[-1][0]
    made.begin(arm(sent[-1]))
    assert made.fault, "beginning again is not clearing"
    made.clear()
    made.begin(arm(sent[-1]))
    moved = made(np.array([-0.5, 0.5]), 0.0, arm(sent[-1]), 0.0)
    assert not made.fault and moved[0] < sent[-1][0]


@pytest.mark.parametrize(("step", "blow"), [(0.07, False), (0.09, True), (math.nan, True)])
def test_a_blow_is_seen_in_how_fast_torques_change(step: float, blow: bool) -> None:
    """16 N m/s over three ticks of 5 ms are 0.24 N m: three steps of 0.08."""
    made = chain(TorqueRate((1e3, 16.0), DT, ticks=3))
    for k in range(1, 4):
        made(START, 0.0, arm(tau=np.array([0.0, k * step])), 0.0)
    assert bool(made.fault) == blow
    assert not blow or "the torque of joint 1 changed by" in made.fault
    with pytest.raises(ConfigError, match="torque_rate"):
        TorqueRate((1.0, 0.0), DT)


def test_old_commands_are_held_then_a_fault() -> None:
    made = chain(Fresh(FreshConfig(hold=0.1, stop=0.3, state=0.05)))
    target = np.array([0.9, 2.0])
    places = [START]
    for k in range(80):  # the observation stays at t = 0
        now = k * DT
        places.append(made(target, 0.0, arm(places[-1], t=now), now).copy())
    assert "observation is 0.305 s old" in made.fault
    held = places[int(0.1 / DT) + 2]
    assert np.abs(places[-1] - held).max() < 0.1 < np.abs(target - places[-1]).max()


def fresh(**changed: float) -> Chain:
    """A chain that looks at the age of observations and measurements."""
    settings: dict[str, Any] = {"hold": 1.0, "stop": 2.0, "state": 0.05, **changed}
    return chain(Fresh(FreshConfig(**settings)))


@pytest.mark.parametrize(
    ("seen", "t", "now", "fault"),
    [
        (0.06, 0.0, 0.06, "last seen"),
        (0.1, 0.2, 0.1, "last seen"),
        (0.1, np.nan, 0.1, "last seen"),
        (0.04, 0.0, 0.0, ""),  # as little as two clocks may be apart
        (60.0, 0.0, 0.0, "60.000 s from the future"),
        (np.nan, 0.0, 0.0, "last observation is nan s old"),
    ],
)
def test_times_that_cannot_be_are_a_fault(seen: float, t: float, now: float, fault: str) -> None:
    made = fresh()
    made(START, seen, arm(t=t), now)
    assert fault in made.fault and bool(fault) == bool(made.fault)


def test_a_pause_between_two_ticks_is_a_fault_where_one_wants_that() -> None:
    made = fresh(state=0.5, pause=0.1)
    for now in (0.0, 0.09, 0.18):
        made(START, now, arm(t=now), now)
        assert not made.fault
    made(START, 0.3, arm(t=0.3), 0.3)
    assert made.fault == "the control process paused for 0.120 s"
    made.clear()
    made.begin(arm(t=9.0))
    made(START, 9.0, arm(t=9.0), 9.0)
    assert not made.fault, "what was before a new begin is no pause"


def test_a_measurement_of_no_time_does_not_hide_an_older_one() -> None:
    made = fresh(state=0.5, frozen=3)
    made(START, 0.2, arm(t=0.2), 0.2)
    made(START, 0.2, arm(t=np.nan), 0.2)
    assert "last seen nan s ago" in made.fault
    made.clear()
    made(START, 0.2, arm(t=0.1), 0.2)
    assert "older than the one before" in made.fault
    made.clear()
    made.begin(arm())
    for k in range(4):
        assert not made.fault
        made(START, k * DT, arm(t=k * DT), k * DT)
    assert "have not changed in 3 ticks" in made.fault


def test_torque_has_patience_and_counts_nan_as_too_large() -> None:
    made = chain(Torque(LIMITS))
    fine, hard = np.array([9.0, 4.0]), np.array([0.0, np.nan])
    rows = ((hard, False), (hard, False), (fine, False), (hard, False), (hard, False), (hard, True))
    for tau, fault in rows:
        made(START, 0.0, arm(tau=tau), 0.0)
        assert bool(made.fault) == fault
    assert "joint 1 measures nan" in made.fault


def test_a_deployed_arm_stops_at_the_third_torque_in_a_row_above_its_limit() -> None:
    """At 100 Hz a collision may last 20 ms before the stop is latched; one peak is no fault."""
    weak = replace(FR3, torque=(20.0,) * 7)
    made = build_chain(simulated(Path(), policy="", limits=weak, fresh=FreshConfig(1.0, 2.0, 1.0)))
    q = fr3.HOME.copy()
    made.begin(arm(q))
    made.required(Enabled).on = True
    blow = np.array([0.0, 0.0, 0.0, -20.1, 0.0, 0.0, 0.0])
    for tau, fault in ((blow, False), (blow, False), (0 * blow, False), (blow, False)):
        made(q, 0.0, arm(q, tau=tau), 0.0)
        assert bool(made.fault) == fault
    made(q, 0.0, arm(q, tau=blow), 0.0)
    assert not made.fault, "two in a row are not three"
    made(q, 0.0, arm(q, tau=blow), 0.0)
    assert "joint 3 measures -20.1 N m, its limit is 20.0" in made.fault


def tool(q: Floats) -> Floats:
    return fr3.forward(q)[0]


def test_the_tool_stays_in_its_workspace_and_above_the_table() -> None:
    table = Box(low=(0.2, -0.3, 0.0), high=(0.8, 0.3, 0.8), planes=((0.0, 0.0, 2.0, 0.2),))
    stage = Workspace(table, tool)
    home = tool(fr3.HOME[None])[0]
    depth = min(*(home - [0.2, -0.3, 0.1]), *([0.8, 0.3, 0.8] - home))
    assert stage.depth(fr3.HOME[None]) == pytest.approx(depth)
    random, q = np.random.default_rng(1), fr3.HOME.copy()
    made = Chain([Finite(), stage], Limiter(FR3, 0.01, [stage.depths]))
    made.begin(arm(q))
    least = np.inf
    for k in range(1500):
        wish = random.uniform(fr3.LOWER, fr3.UPPER) if k % 50 == 0 else wish  # noqa: F821
        q = made(wish, 0.0, arm(q), 0.0).copy()
        least = min(least, stage.depth(q[None]))
    assert made.counts[1] > 500 and not made.fault
    assert least > -1e-3  # between two samples of a motion to rest it may bulge
    assert not np.allclose(q, fr3.HOME, atol=0.1), "it moves"


def test_a_tool_outside_may_come_in_but_not_go_further_out() -> None:
    first = np.array([1.0, 0.0, 0.0])  # a joint that slides along x
    stage = Workspace(Box(low=(-1.0, -1.0, -1.0), high=(1.0, 1.0, 1.0)), lambda q: q * first)
    limits = Limits((-3.0,), (3.0,), (0.0,), (2.0,), (10.0,), (500.0,), (1.0,), (9.0,))
    made = Chain([stage], Limiter(limits, 0.01, [stage.depths]))
    here = arm(np.array([1.5]))
    for wish, expected in ((2.5, 1.5), (1.2, 1.2), (-2.0, -1.0)):
        made.begin(here)
        for _ in range(400):
            sent = made(np.array([wish]), 0.0, here, 0.0)
        assert sent[0] == pytest.approx(expected, abs=2e-3)


def test_limits_that_are_not_set_do_not_start() -> None:
    fields = {k: getattr(LIMITS, k) for k in Limits.__dataclass_fields__}
    with pytest.raises(TypeError):
        Limits(**{k: v for k, v in fields.items() if k != "jerk"})
    for key, value in (("jerk", (1.0,)), ("velocity", (0.0, 1.0)), ("high", (np.inf, 2.0))):
        with pytest.raises(ConfigError, match=f"limits.{key}"):
            Limits(**{**fields, key: value})
    with pytest.raises(ConfigError, match=r"low \+ margin"):
        Limits(**{**fields, "margin": (1.0, 0.0)})


def test_a_stopped_arm_does_not_leave_its_regions_before_it_rests() -> None:
    """Its set-point yields to a pose inside; time-optimally it got there around the outside."""

    def inside(q: Floats) -> Floats:
        return 1.5 - q[:, 0] - q[:, 1]

    limiter = Limiter(LIMITS, DT, [inside])
    limiter.begin(np.array([-0.9, 1.0]))
    while limiter.q[0] < 0.2:
        limiter(np.array([0.5, 1.0]))
    sent = [limiter.unguarded(np.array([-0.5, 1.99])).copy() for _ in range(600)]
    assert inside(np.stack(sent)).min() > -5e-3
    assert sent[-1] == pytest.approx([-0.5, 1.99], abs=1e-6)
    within(np.stack(sent))


@pytest.mark.parametrize("seed", range(10))
def test_wherever_a_stopped_arm_is_measured_it_comes_to_rest_in_its_regions(seed: int) -> None:
    random = np.random.default_rng(seed)
    side = random.normal(size=N)

    def inside(q: Floats) -> Floats:  # a half-plane, 0.1 beyond the start
        return 0.1 - (q - START) @ (side / np.linalg.norm(side))

    limiter = Limiter(LIMITS, DT, [inside])
    limiter.begin(START)
    for _ in range(30):
        target = random.uniform(LIMITS.low, LIMITS.high)
        sent = [limiter(target).copy() for _ in range(int(random.integers(5, 60)))]
        measured = random.uniform(LIMITS.low, LIMITS.high)
        for tick in range(1000):
            if limiter.resting:
                break
            if tick < 100:  # what is measured changes at first, and may be outside
                measured = measured + random.normal(0, 0.01, N)
            sent.append(limiter.unguarded(measured).copy())
        assert limiter.resting
        assert inside(np.stack(sent)).min() > -5e-3
        within(np.stack(sent))
