"""The limiter where its planner fails, a guard refuses, the tool is too fast, or a person moved the
arm: it brakes, within the limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ruckig

from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.limiter import Limiter
from tests.real_robot.test_chain import DT, LIMITS, START, within

SLOW = replace(LIMITS, velocity=(1.0, 1.0))
FAR = np.array([0.8, 1.9])
AGAIN = (0.0, 1e-9, 1e-7, 1e-5)  # rad before the target


class Failing:
    """A planner that fails `times` times on the way to a target: `targets` [n] that it was asked
    for. `blind`: it plans no motion to rest either."""

    def __init__(self, limiter: Any, raises: bool = False) -> None:
        self.planner, self.raises, self.times, self.blind = limiter._planner, raises, 0, False
        self.targets: list[list[float]] = []
        self.updates = self.rests = 0
        limiter._planner = self

    def fail(self) -> Any:
        if self.raises:
            raise ruckig.RuckigError("no motion")
        return ruckig.Result.Error

    def update(self, state: Any, result: Any) -> Any:
        self.updates += 1
        if state.control_interface == ruckig.ControlInterface.Position:
            self.targets.append(list(state.target_position))
            if self.fails():
                return self.fail()
        return self.planner.update(state, result)

    def fails(self) -> bool:
        return len(self.targets) <= self.times

    def calculate(self, state: Any, trajectory: Any) -> Any:
        self.rests += 1
        return self.fail() if self.blind else self.planner.calculate(state, trajectory)


class Gate:
    """A guard that says `depths` of the places that it is asked about, which are `asked` [9, n]."""

    def __init__(self, *depths: float) -> None:
        self.depths = depths
        self.asked: Floats = np.zeros((0, 2))

    def __call__(self, path: Floats) -> Floats:
        self.asked = path.copy()
        more = [self.depths[-1]] * (len(path) - len(self.depths))
        return np.array([*self.depths, *more])


def moving(*guards: Any, **more: Any) -> Limiter:
    """On its way from START to FAR, as fast as it may."""
    limiter = Limiter(SLOW, DT, guards, **more)
    limiter.begin(START)
    for _ in range(40):
        limiter(FAR)
    return limiter


def speeds(limiter: Limiter, ticks: int, target: Floats = FAR, free: bool = False) -> Floats:
    """Of the first joint (rad/s) in the next ticks, in which the limits are kept."""
    move = limiter.unguarded if free else limiter
    sent = [limiter.q.copy(), *(move(target).copy() for _ in range(ticks))]
    within(np.stack(sent), limiter.limits)
    return np.diff(np.stack(sent)[:, 0]) / DT


def goes_on(limiter: Limiter) -> bool:
    """Whether the next tick does not brake."""
    before = limiter.q.copy()
    limiter(FAR)
    speed = (limiter.q - before)[0] / DT
    assert speed > 0.99, "as hard as its limits allow, and not harder"
    return bool(speed > 1 - 1e-6)


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("times", range(5))
def test_where_no_motion_is_found_one_to_a_place_before_it_is(times: int, raises: bool) -> None:
    limiter = moving()
    failing = Failing(limiter, raises)
    failing.times = times
    assert goes_on(limiter) == (times < 4), "then it brakes"
    tried = np.array(failing.targets)[: times + 1]
    assert tried == pytest.approx(FAR - np.array(AGAIN[: times + 1])[:, None], abs=1e-12)
    failing.targets.clear()
    failing.times = 1
    speeds(limiter, 1, np.array([-0.05, 0.5]))
    assert limiter.q[0] > 0.05 and failing.targets[1][0] == pytest.approx(-0.05 + 1e-9, abs=1e-12)
    assert speeds(limiter, 60)[-1] > 0, "and goes on where one is found again"


@pytest.mark.parametrize("raises", [False, True])
def test_where_no_motion_to_rest_is_found_it_brakes(raises: bool) -> None:
    limiter = moving(Gate(1.0))
    failing = Failing(limiter, raises)
    assert goes_on(limiter)
    failing.blind = True
    assert not goes_on(limiter)
    assert speeds(limiter, 100)[-1] == 0 and limiter.resting


def test_a_planner_that_cannot_brake_is_an_error() -> None:
    limiter: Any = moving()
    limiter._step = lambda: False
    with pytest.raises(RuntimeError, match="planner failed"):
        limiter.brake()


def test_limits_are_reached_and_not_passed() -> None:
    limiter = Limiter(LIMITS, DT)
    limiter.begin(START)
    for target, reached in ((9.0, (0.9, 2.0)), (-9.0, (-0.9, 0.0))):
        for free in (False, True):
            limiter.begin(START)
            speeds(limiter, 500, np.full(2, target), free)
            assert limiter.resting and limiter.q == pytest.approx(reached, abs=1e-7)
            assert (np.abs(limiter.q - reached) > 1e-8).all(), "the planner rounds"


def test_it_begins_at_rest_also_in_the_midst_of_a_motion() -> None:
    limiter = moving()
    assert not limiter.resting
    limiter.begin(START)
    assert limiter.resting and (limiter.brake() == START).all()


def test_a_stopped_arm_outside_its_limits_stays_where_a_person_led_it() -> None:
    limiter = Limiter(LIMITS, DT)
    out = np.array([1.2, 1.0])
    limiter.begin(out)
    assert (limiter.unguarded(out) == out).all()
    limiter.begin(np.zeros(2))
    assert (limiter.unguarded(np.array([2e-8, 0.0])) == 0).all(), "no more than rounding"
    limiter.begin(START)
    speeds(limiter, 200, START + np.array([0.0, 0.3]), free=True)
    assert limiter.q == pytest.approx(START + np.array([0.0, 0.3]), abs=1e-7), "one joint alone"


def test_what_a_guard_refuses_is_braked() -> None:
    """Asked at nine places, from where it is to where it would rest."""
    gate = Gate(1.0)
    for guards in ((gate, Gate(0.0, -1.0)), (Gate(0.0, -1.0), gate)):
        limiter = Limiter(SLOW, DT, guards)
        limiter.begin(START)
        assert (speeds(limiter, 5) == 0).all(), "one that refuses is enough"
    limiter, braked = moving(gate), moving()
    limiter(FAR)
    for _ in range(100):
        braked.brake()
    assert gate.asked.shape == (9, 2) and gate.asked[0] == pytest.approx(limiter.q, abs=0.006)
    assert gate.asked[-1] == pytest.approx(braked.q, abs=0.02)
    gate.depths = (0.0, -1.0)
    assert not goes_on(limiter)
    assert speeds(limiter, 100)[-1] == 0 and limiter.resting


@pytest.mark.parametrize(
    ("depths", "moves"),
    [
        *(((0.0,), True), ((0.0, 0.0, 0.0, -2e-9), False), ((1.0, 0.2), True)),
        *(((-0.2,), True), ((-0.2, -0.2 - 1e-9), True), ((-0.2, -0.2 - 5e-8), False)),
        *(((-0.2, -0.201), False), ((-0.2, -0.1), True), ((-0.2, -0.1, -0.1015), True)),
        *(((-0.2, -0.1, -0.15), False), ((-0.2, 1.0), True), ((-0.2, 1.0, -0.1), False)),
    ],
)
def test_an_arm_outside_may_only_come_in(depths: tuple[float, ...], moves: bool) -> None:
    limiter = Limiter(LIMITS, DT, [Gate(*depths)])
    limiter.begin(START)
    assert (speeds(limiter, 3).max() > 0) == moves


def test_what_was_gained_is_not_given_back_while_it_moves() -> None:
    """Only where it rests, something else has moved the arm, and it begins anew."""
    for depth, moves in ((-0.002, True), (-0.0021, False), (-0.5, False), (0.1, True)):
        gate = Gate(0.0)
        limiter = moving(gate)
        gate.depths = (depth,)
        assert goes_on(limiter) == moves, depth
        limiter.begin(START)
        assert speeds(limiter, 3).min() > 0
    gate = Gate(0.0)
    limiter = moving(gate)
    limiter.begin(START)
    gate.depths = (-0.002,)
    assert speeds(limiter, 2).min() > 0, "no further out than a motion may lead"
    gate.depths = (-0.003,)
    assert speeds(limiter, 8).min() < 1e-9, "so that was no new beginning"


def test_a_stopped_arm_that_was_refused_rests_before_it_yields() -> None:
    gate = Gate(1.0)
    limiter = moving(gate)
    assert speeds(limiter, 4, free=True).min() > 1 - 1e-6, "what is allowed goes on"
    gate.depths = (0.0, -1.0)
    speeds(limiter, 1, free=True)
    gate.depths = (1.0,)
    braking = speeds(limiter, 60, free=True)
    at = int(np.argmin(braking))
    assert braking[at] < 0.05 and (np.diff(braking[: at + 1]) <= 0).all()
    assert braking[at:].max() > 0.1, "and then it does"
    gate.depths = (0.0, -1.0)
    limiter.begin(START)
    assert speeds(limiter, 20, free=True).max() > 0.1, "nobody asks the guards any more"


def test_a_new_command_ends_the_braking_of_a_stop() -> None:
    gate = Gate(1.0)
    limiter = moving(gate)
    gate.depths = (0.0, -1.0)
    speeds(limiter, 1, free=True)
    gate.depths = (1.0,)
    speeds(limiter, 3)
    assert speeds(limiter, 8, free=True)[-1] > 1 - 1e-6, "allowed again"


def lever(q: Floats) -> Floats:
    """Places [k, 3] of a tool that both joints move: by 1 m along x, by 0.5 m along y."""
    return np.stack([q[:, 0], 0.5 * q[:, 1], 0 * q[:, 0]], 1)


@pytest.mark.parametrize(("most", "slow"), [(0.5, 0.4), (0.1, 0.08), (0.01, 0.008), (np.inf, 0.9)])
def test_the_tool_is_as_fast_as_its_limit_and_not_faster(most: float, slow: float) -> None:
    limiter = Limiter(LIMITS, DT, forward=lever, tool_speed=most)
    limiter.begin(START)
    sent = [START.copy()]
    for wish in ([0.9, 2.0], [-0.9, 0.5], [0.9, 0.0]):
        sent += [limiter(np.array(wish)).copy() for _ in range(150)]
    within(np.stack(sent))
    fast = np.linalg.norm(np.diff(lever(np.stack(sent)), axis=0), axis=1) / DT
    assert fast.max() <= most * (1 + 1e-9) and np.quantile(fast, 0.6) > slow


def test_a_slow_joint_is_slowed_down_further_for_a_slow_tool() -> None:
    slow = replace(LIMITS, velocity=(0.05, 0.05))
    limiter = Limiter(slow, DT, forward=lever, tool_speed=0.001)
    limiter.begin(START)
    for _ in range(100):
        before = limiter.q.copy()
        limiter(FAR)
    assert 0.0005 < np.linalg.norm(lever((limiter.q - before)[None])) / DT < 0.001


def test_a_tool_that_is_never_slow_enough_makes_it_brake() -> None:
    """After three plans, each slower than the one before."""
    calls = 0

    def shakes(q: Floats) -> Floats:
        nonlocal calls
        calls += 1
        assert len(q) == 44
        return 1e6 * lever(q)

    limiter = Limiter(SLOW, DT, forward=shakes, tool_speed=1.0)
    limiter.begin(START)
    assert speeds(limiter, 1)[0] == 0 and calls == 3
    limiter = moving(forward=lever, tool_speed=2.0)
    assert goes_on(limiter)
    limiter.forward = shakes
    assert not goes_on(limiter)
    assert speeds(limiter, 100)[-1] == 0 and limiter.resting
    limiter = moving(forward=lever, tool_speed=0.3)
    assert speeds(limiter, 5).max() < 0.3
    limiter.forward = None
    assert speeds(limiter, 20).max() > 0.6, "its own limits are as they were"


def test_it_says_where_the_tools_limit_made_it_slower() -> None:
    limiter = Limiter(SLOW, DT, forward=lambda q: 1e6 * lever(q), tool_speed=1.0)
    limiter.begin(START)
    assert not limiter.slowed
    limiter(FAR)
    assert limiter.slowed, "also where it had to brake"
    limiter.brake()
    assert not limiter.slowed
    limiter(FAR)
    limiter.forward = None
    limiter(FAR)
    assert not limiter.slowed


def test_a_target_too_far_for_a_plan_makes_it_brake() -> None:
    """10 rad at 20 microrad/s, for the sake of a slow tool: ruckig plans no more than 7,600 s, and
    its binding has no name for that result."""
    wide = replace(LIMITS, low=(-10.0, -10.0), high=(10.0, 10.0), velocity=(0.02, 0.02))
    limiter = Limiter(wide, DT)
    limiter.begin(np.zeros(2))
    far = np.array([9.0, 9.0])
    assert speeds(limiter, 20)[-1] > 0
    limiter.forward, limiter.tool_speed = lambda q: 1e6 * lever(q), 1.0
    for _ in range(100):
        limiter(far)
    assert limiter.resting and limiter.slowed
    limiter.forward = None
    before = limiter.q.copy()
    assert (limiter(far) > before).all()


def test_the_work_of_a_tick_is_bounded() -> None:
    """Whatever is asked: three plans of four tries each, three motions to rest, and a brake. Guards
    see only a motion that is slow enough, at nine places."""
    limiter = Limiter(SLOW, DT, [gate := Gate(1.0)], lambda q: 1e6 * lever(q), tool_speed=1.0)
    limiter.begin(START)
    failing = Failing(limiter)
    failing.fails = lambda: len(failing.targets) % 4 > 0
    assert (limiter(FAR) == START).all()
    assert (failing.updates, failing.rests, len(gate.asked)) == (13, 3, 0)
    moving(gate)
    assert len(gate.asked) == 9
