"""The control loop tick by tick, on an arm without mass: what each mode lets through, and what the
driver, the source and the button hear of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.hand import REST_FORCE
from embodied.real_robot.kernel.last_resort import describe
from embodied.real_robot.kernel.loop import GIVE_UP, LET_GO, NEAR, ControlLoop
from embodied.real_robot.kernel.messages import PRESSED_AGAIN, TEXT, Command, Ended, Mode
from embodied.real_robot.kernel.rate import Rate
from embodied.real_robot.kernel.source import SetPoint
from tests.real_robot.ideal_arm import IdealArm
from tests.real_robot.modes import Modes


class Heard:
    """The calls of methods, in their order, with what they were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.settings: list[dict[str, Any]] = []

    def of(self, owner: Any, name: str, does: Callable[..., Any] | None = None) -> None:
        """Note each call of `owner.name`, which does `does` (None: what it did)."""
        usual = getattr(owner, name) if does is None else does

        def called(*args: Any, **settings: Any) -> Any:
            self.calls.append((name, args))
            self.settings.append(settings)
            return usual(*args, **settings)

        setattr(owner, name, called)

    def count(self, name: str) -> int:
        """How often a method was called."""
        return sum(each == name for each, _ in self.calls)


class Board:
    """A hardware watchdog."""

    def __init__(self) -> None:
        self.fault, self.beats, self.waits = "", 0, 0

    def beat(self) -> None:
        self.beats += 1

    def wait(self) -> None:
        self.waits += 1


class Ticks(Modes):
    """The arm, with a loop that may be looked into."""

    def __init__(self, config: str = "so101_sim") -> None:
        super().__init__(config)
        self.loop: Any = self.control
        self.driver: Any = self.arm
        self.heard_of = Heard()

    def _judge(self, mode: Mode, done: Command | None, sent: Floats) -> None:
        """Here tests put the arm elsewhere, and break the loop."""
        self.mode, self.sent = mode, sent

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            self.tick()

    def until(self, mode: Mode, ticks: int = 400) -> None:
        """Tick on until that mode."""
        while self.mode != mode:
            ticks -= 1
            assert ticks > 0, f"{self.mode.name} in place of {mode.name}: {self.loop.fault}"
            self.tick()

    def moving(self) -> None:
        """Running, and on the way."""
        self.action = np.full(len(self.names), 0.5)
        self.do("go", 0)
        assert self.mode == Mode.RUNNING
        self.run(12)
        assert not self.loop.resting

    def refuses(self, command: Command) -> bool:
        """Whether it is answered, and changes nothing."""
        before = self.mode
        done = self.tick(command)
        refused = self.there.state.fields["refused"][0] == self.there.request.fields["number"][0]
        return bool(refused) and not done and self.mode == before

    def stopped(self) -> None:
        """At rest after a stop."""
        self.tick(Command.ESTOP)
        self.run(250)
        assert self.mode == Mode.ESTOP


@pytest.fixture
def arm() -> Iterator[Ticks]:
    made = Ticks()
    yield made
    made.folder.cleanup()


def test_what_is_true_before_the_first_tick(arm: Ticks) -> None:
    loop = arm.loop
    flags = ("quit", "internal_error", "_connection_failed", "_home_pending", "_given_up")
    assert not any(getattr(loop, name) for name in (*flags, "_testing", "_compliant", "_waiting"))
    assert loop.mode == Mode.IDLE and loop.fault == "" and not loop.enabled.on
    assert loop._sent_width == 0 and loop.width == arm.driver.width


def test_a_fault_of_the_hardware_watchdog_stops_for_good(arm: Ticks) -> None:
    arm.loop.watchdog = board = Board()
    arm.moving()
    assert board.beats > 10
    board.fault = "the board hears nothing"
    arm.tick()
    assert arm.mode == Mode.ESTOP and arm.loop.fault == board.fault
    board.fault = ""
    arm.run(250)
    assert board.waits == 0
    arm.tick(Command.RESET)
    assert arm.mode == Mode.IDLE and board.waits == 1, "it is closed again before anything moves"


def test_an_episode_whose_time_is_over_comes_to_rest(arm: Ticks) -> None:
    arm.there.request.fields["seconds"] = 0.5
    arm.moving()
    arm.until(Mode.STOPPING)
    assert not arm.loop.enabled.on and not arm.loop.resting
    arm.until(Mode.IDLE)
    assert arm.loop.resting and not arm.loop.fault


def test_what_ends_the_process_lets_the_arm_come_to_rest_first(arm: Ticks) -> None:
    arm.moving()
    arm.loop.quit_reason = "the terminal is gone"
    arm.tick()
    assert arm.mode == Mode.ESTOP and arm.loop.fault == "the terminal is gone"
    ticks = 0
    while not arm.loop.quit:
        ticks += 1
        assert ticks < 400
        rested = arm.loop.resting and arm.loop.yielding.settled
        arm.tick()
    assert rested and ticks > 3


def test_a_process_without_an_arm_ends_at_once_and_moves_nothing(arm: Ticks) -> None:
    arm.loop.mode = Mode.DISCONNECTED
    for name in ("read", "write", "hold"):
        arm.heard_of.of(arm.driver, name)
    arm.loop.turn()
    assert not arm.loop.quit
    arm.loop.quit_reason = "the terminal is gone"
    arm.loop.turn()
    assert arm.loop.quit and not arm.heard_of.calls


def test_the_button_reaches_the_robot_but_not_when_it_is_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuts: list[Mode] = []
    monkeypatch.setattr(IdealArm, "cut", lambda self: cuts.append(arm.loop.mode))
    arm = Ticks()
    assert not cuts, "a session begins with a test"
    arm.tick(Command.ESTOP)
    assert len(cuts) == 1
    arm.there.estop.press()
    arm.pressed = True
    arm.heard_of.of(arm.loop.yielding, "begin")
    arm.tick()
    assert len(cuts) == 2
    assert arm.heard_of.settings == [{"moving": True}], "it yields anew"
    arm.folder.cleanup()


def test_without_a_stop_test_the_button_reaches_the_robot(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[None] = []
    monkeypatch.setattr(IdealArm, "cut", lambda self: cuts.append(None))
    monkeypatch.setattr(ControlLoop, "test_stop", lambda self: None)
    arm = Ticks()
    arm.tick(Command.ESTOP)
    assert len(cuts) == 1
    arm.folder.cleanup()


def test_only_an_arm_at_rest_is_left(arm: Ticks) -> None:
    arm.moving()
    assert arm.refuses(Command.QUIT) and not arm.loop.quit
    arm.tick(Command.STOP)
    assert arm.mode == Mode.STOPPING and not arm.loop.enabled.on
    assert arm.refuses(Command.QUIT)
    arm.until(Mode.IDLE)
    assert arm.refuses(Command.STOP)
    arm.tick(Command.QUIT)
    assert arm.loop.quit


@pytest.mark.parametrize("command", [Command.ARM, Command.HOME])
def test_nothing_begins_to_move_without_the_daemon(arm: Ticks, command: Command) -> None:
    arm.on["daemon"] = False
    arm.run(round(2 * arm.made.heartbeat.hold / arm.dt))
    assert arm.refuses(command)
    arm.on["daemon"] = True
    arm.tick()
    assert arm.tick(command) and arm.mode != Mode.IDLE


def test_armed_once_and_started_from_there_only(arm: Ticks) -> None:
    assert arm.refuses(Command.START)
    arm.heard_of.of(arm.loop.source, "begin")
    assert arm.tick(Command.ARM) and arm.mode == Mode.ARMED
    assert arm.heard_of.count("begin") == 1, "the source continues from here"
    assert arm.refuses(Command.ARM) and arm.refuses(Command.HOME)
    arm.run(10)
    stretch: list[Any] = []
    arm.driver.droop, arm.driver.unloaded = np.zeros_like, stretch.append
    assert arm.tick(Command.START) and arm.mode == Mode.RUNNING and arm.loop.enabled.on
    assert arm.heard_of.count("begin") == 2
    assert len(stretch) == 1 and np.abs(stretch[0]).max() < 1e-9


def test_it_starts_near_its_set_point_and_with_a_young_observation(arm: Ticks) -> None:
    arm.tick(Command.ARM)
    arm.run(10)
    near = 0.2 * np.asarray(arm.made.limits.tracking)
    here = arm.loop.chain.limiter.q.copy()
    arm.heard_of.of(arm.driver, "write", lambda q, width: None)
    arm.driver.goal = here + 1.01 * near * np.eye(len(here))[0]
    arm.run(1)
    assert arm.refuses(Command.START)
    arm.driver.goal = here + 0.9 * near * np.eye(len(here))[0]
    arm.run(1)
    arm.on["policy"] = False
    arm.run(round(1.5 * arm.loop.fresh.config.hold / arm.dt))
    assert arm.refuses(Command.START)
    arm.on["policy"] = True
    arm.run(10)
    seen, hold = 2.0 ** np.ceil(np.log2(arm.now)), arm.loop.fresh.config.hold
    arm.loop.source.point.seen = seen
    assert arm.loop._ready(seen + hold) and not arm.loop._ready(seen + hold + 1e-3)
    arm.run(10)
    arm.there.request.fields["seconds"] = np.nan
    assert arm.refuses(Command.START)
    arm.there.request.fields["seconds"] = 0.0
    assert arm.tick(Command.START)


def test_the_way_home_ends_idle_with_things_laid_out_again(arm: Ticks) -> None:
    arm.moving()
    assert arm.refuses(Command.HOME)
    arm.tick(Command.STOP)
    arm.until(Mode.IDLE)
    arm.run(30)
    arm.heard_of.of(arm.driver, "renew")
    arm.heard_of.of(arm.loop.homing, "begin")
    arm.heard_of.of(arm.loop.chain, "forget")
    assert arm.tick(Command.HOME) and arm.mode == Mode.HOMING
    assert arm.heard_of.count("forget") == 1, "it rests first"
    arm.until(Mode.IDLE)
    assert arm.heard_of.count("renew") == arm.heard_of.count("begin") == 1
    assert np.allclose(arm.driver.q, arm.made.home, atol=2e-3) and not arm.loop.enabled.on
    arm.loop.homing.why_not = lambda q: "a wall is in the way"
    assert arm.refuses(Command.HOME)
    assert arm.there.state.fields["reason"][0] == b"a wall is in the way"
    arm.loop.homing = None
    assert arm.refuses(Command.HOME)


def test_a_reset_waits_for_rest_and_for_who_has_seen_the_press(arm: Ticks) -> None:
    arm.moving()
    assert arm.refuses(Command.RESET)
    arm.tick(Command.ESTOP)
    assert arm.refuses(Command.RESET), "it still moves"
    arm.run(250)
    arm.heard_of.of(arm.loop.source, "forget")
    old = int(arm.there.estop.number)
    arm.there.estop.press()
    arm.pressed = True
    arm.tick()
    arm.run(20)
    request = arm.there.request.fields
    request["number"], request["command"], request["stop"] = request["number"] + 1, 5, old
    arm.there.request.send()
    arm.tick()
    assert arm.mode == Mode.ESTOP
    assert arm.there.state.fields["reason"][0].decode() == PRESSED_AGAIN
    assert arm.tick(Command.RESET) and arm.mode == Mode.IDLE
    assert arm.heard_of.count("forget") == 1 and arm.loop.fault == ""


def test_who_would_fall_is_released_only_where_somebody_holds_it(arm: Ticks) -> None:
    arm.heard_of.of(arm.driver, "write")
    arm.driver.falls_when_released = True
    assert arm.refuses(Command.RELEASE)
    assert arm.tick(Command.RELEASE_SUPPORTED) and arm.mode == Mode.RELEASED and arm.driver.free
    written = arm.heard_of.count("write")
    arm.run(5)
    assert arm.heard_of.count("write") == written, "nothing is sent meanwhile"
    arm.heard_of.of(arm.driver, "engage")
    arm.tick(Command.ESTOP)
    assert arm.mode == Mode.ESTOP and arm.heard_of.count("engage") == 1 and not arm.driver.free
    arm.run(100)
    arm.tick(Command.RESET)
    assert arm.mode == Mode.IDLE and arm.heard_of.count("engage") == 1, "held once"
    arm.moving()
    assert arm.refuses(Command.RELEASE_SUPPORTED)


def test_a_released_arm_is_followed_only_where_all_of_it_was_measured(arm: Ticks) -> None:
    assert not arm.loop.chain.guided
    arm.tick(Command.RELEASE)
    assert arm.loop.chain.guided, "force and limits of speed do not count"
    read = arm.driver.read

    def one_joint_is_unknown() -> ArmState:
        state = read()
        state.q[2] = np.nan
        return state

    arm.driver.read = one_joint_is_unknown
    arm.heard_of.of(arm.loop.chain.limiter, "begin")
    arm.run(1)
    assert all(np.isfinite(given).all() for _, (given,) in arm.heard_of.calls)


def test_a_hand_begins_where_the_source_wants_it(arm: Ticks) -> None:
    source, loop = arm.loop.source, arm.loop

    def wants(q: Floats, width: float, now: float) -> None:
        source.point.width = wanted

    source.begin, wanted = wants, 0.02
    loop._begin(source, arm.now)
    assert loop.width == 0.02
    source.point.problem, wanted = "it is lost", 0.03
    loop._begin(source, arm.now)
    assert loop.width == 0.02, "of a set-point that cannot be followed nothing is taken"


def test_an_arm_that_cannot_be_released_or_held_again_stays_stopped(arm: Ticks) -> None:
    def fails() -> None:
        raise DriverError("its brakes are stuck")

    arm.driver.release = fails
    assert arm.refuses(Command.RELEASE)
    del arm.driver.release
    arm.tick(Command.RELEASE)
    arm.run(5)
    arm.driver.engage, arm.driver.stop = fails, lambda: None
    arm.tick(Command.RESET)
    assert arm.mode == Mode.ESTOP and arm.loop.fault == "its brakes are stuck"
    del arm.driver.engage, arm.driver.stop
    arm.run(100)
    arm.heard_of.of(arm.driver, "engage")
    assert arm.tick(Command.RESET) and arm.heard_of.count("engage") == 1, "it is tried again"


def test_it_waits_for_a_silent_daemon_and_continues_from_where_it_came_to_rest(arm: Ticks) -> None:
    arm.moving()
    arm.heard_of.of(arm.loop.source, "begin")
    arm.on["daemon"] = False
    arm.run(round((arm.made.heartbeat.hold + 0.8) / arm.dt))
    assert arm.mode == Mode.RUNNING and arm.loop.resting
    moves = arm.there.state.fields["sent"][0].copy()
    arm.run(3)
    assert np.abs(arm.there.state.fields["sent"][0] - moves).max() < 1e-9
    assert arm.heard_of.count("begin") == 0
    arm.on["daemon"] = True
    arm.run(2)
    assert arm.heard_of.count("begin") == 1
    arm.run(20)
    assert not arm.loop.resting


def test_a_set_point_that_took_too_long_is_a_fault(arm: Ticks) -> None:
    arm.moving()
    most, move = arm.loop.fresh.config.stop, arm.loop.source.move
    took, arm.now = most, 1024.0  # their sum is exact

    def slow(*args: Any) -> None:
        move(*args)
        arm.now += took

    arm.loop.source.move = slow
    clock = arm.now
    assert arm.loop._follow(arm.loop.source, arm.loop.arm, clock) == ""
    took = most + 0.01
    assert "a set-point took" in arm.loop._follow(arm.loop.source, arm.loop.arm, clock)


@pytest.mark.parametrize("how", ["away", "unheard"])
def test_a_stop_that_is_not_followed_is_given_up_once(arm: Ticks, how: str) -> None:
    arm.loop.watchdog = board = Board()
    arm.stopped()
    assert board.beats > 100
    for name in ("halt", "write"):
        arm.heard_of.of(arm.driver, name, lambda *args: None)
    if how == "away":
        arm.driver.goal = arm.driver.q + 1.6 * np.eye(5)[0]  # rad: more than it yields in GIVE_UP
    else:
        arm.driver.broken = True
    arm.run(round(0.9 * GIVE_UP / arm.dt))
    followed, arm.loop._followed = arm.loop._followed, 1024.0 - GIVE_UP
    arm.loop._watch_stop(1024.0)
    arm.loop._followed = followed
    assert arm.heard_of.count("halt") == 0
    arm.run(round(1.1 * GIVE_UP / arm.dt))
    beats, written = board.beats, arm.heard_of.count("write")
    arm.run(round(2 * GIVE_UP / arm.dt))
    assert arm.heard_of.count("halt") == 1 and board.beats == beats
    assert arm.heard_of.count("write") == written
    arm.driver.broken = False
    arm.driver.goal = arm.driver.q.copy()
    arm.run(5)
    arm.tick(Command.RESET)
    arm.run(3)
    assert arm.mode == Mode.IDLE and board.beats > beats
    assert arm.heard_of.count("write") > written


def test_a_stopped_arm_that_is_only_a_little_away_is_followed(arm: Ticks) -> None:
    arm.stopped()
    arm.heard_of.of(arm.driver, "halt", lambda: None)
    arm.heard_of.of(arm.driver, "write", lambda q, width: None)
    arm.driver.goal = arm.driver.q + 0.9 * np.asarray(arm.made.limits.tracking)
    arm.run(round(2 * GIVE_UP / arm.dt))
    assert arm.heard_of.count("halt") == 0


def test_an_arm_that_nothing_moves_is_held_and_may_move_by_itself(arm: Ticks) -> None:
    for name in ("hold", "write"):
        arm.heard_of.of(arm.driver, name)
    arm.run(5)
    assert [name for name, _ in arm.heard_of.calls] == ["hold", "write"] * 5
    arm.moving()
    last = [name for name, _ in arm.heard_of.calls[-8:]]
    assert last == ["write"] * 8
    arm.tick(Command.STOP)
    arm.until(Mode.IDLE)
    arm.driver.hold = lambda q, width: False
    arm.driver.goal = arm.driver.q + 0.02
    arm.run(2)
    assert np.abs(arm.loop.chain.limiter.q - arm.driver.q).max() < 1e-9, "the set-point follows"


def test_the_stiffness_of_the_chain_and_the_hand_reach_the_driver(arm: Ticks) -> None:
    said: list[Any] = []
    arm.driver.springs, arm.driver.stiffness, arm.driver.stiffen = None, None, said.append
    arm.run(1)
    assert not said
    first = arm.loop.chain.stages[0]

    def stiff(tick: Any) -> None:
        first(tick)
        tick.stiffness = np.ones(2)

    arm.loop.chain.stages[0] = stiff
    arm.run(1)
    assert len(said) == 1
    arm.heard_of.of(arm.loop.chain.hand, "tell")
    arm.driver.deaf = True
    arm.run(1)
    assert arm.mode == Mode.ESTOP and arm.heard_of.count("tell") == 1, "also of a deaf arm"


def test_a_wire_that_takes_nothing_is_halted(arm: Ticks) -> None:
    arm.moving()
    arm.heard_of.of(arm.driver, "halt")
    arm.driver.deaf = True
    arm.tick()
    assert arm.mode == Mode.ESTOP and arm.loop.fault == "the ideal arm takes nothing"
    assert arm.heard_of.count("halt") == 1 and arm.loop._connection_failed


def test_after_a_broken_wire_it_continues_from_where_it_stands(arm: Ticks) -> None:
    arm.moving()
    arm.driver.broken = True
    arm.run(100)
    assert arm.mode == Mode.ESTOP and "broken" in arm.loop.fault
    arm.driver.broken = False
    arm.driver.goal = arm.driver.q + 0.03
    arm.run(1)
    assert arm.tick(Command.RESET) and arm.mode == Mode.IDLE
    assert np.abs(arm.loop.chain.limiter.q - arm.driver.q).max() < 1e-3
    assert not arm.loop._connection_failed


def test_an_arm_that_is_held_again_begins_above_its_droop(arm: Ticks) -> None:
    loop = arm.loop
    loop.droop = lambda q: np.full(5, 0.01)
    arm.tick(Command.RELEASE)
    arm.driver.led = 0.1
    arm.run(5)
    loop._engage()
    assert loop.chain.limiter.q == pytest.approx(loop.yielding.pose + 0.01)
    assert loop._connection_failed and not loop._compliant


def test_an_arm_that_cannot_be_held_again_is_where_it_was_measured(arm: Ticks) -> None:
    loop = arm.loop
    arm.tick(Command.RELEASE)
    there = ArmState(np.full(5, 0.25), np.zeros(5), np.zeros(5), arm.now)

    def fails() -> None:
        raise DriverError("its brakes are stuck", measured=there)

    arm.driver.engage = fails
    loop._engage()
    assert loop.arm is there and (loop.yielding.pose == 0.25).all() and loop._connection_failed
    assert loop.fault == "its brakes are stuck" and loop._compliant


def test_a_wire_that_breaks_before_it_was_connected_is_latched_too(arm: Ticks) -> None:
    arm.loop.mode = Mode.DISCONNECTED
    arm.loop._connection_lost(DriverError("nobody answers"))
    assert arm.loop.mode == Mode.ESTOP and arm.loop.fault == "nobody answers"


def test_a_reset_measures_anew(arm: Ticks) -> None:
    arm.stopped()
    arm.loop.droop = lambda q: np.full(5, 0.01)
    arm.loop._given_up = True
    moved = arm.driver.q + 0.03

    def recover() -> None:
        arm.driver.goal = moved.copy()

    arm.driver.recover = recover
    arm.loop._reset()
    assert arm.loop.arm.q == pytest.approx(moved)
    assert arm.loop.chain.limiter.q == pytest.approx(moved + 0.01)


@pytest.mark.parametrize("why", ["", "_connection_failed", "_given_up", "internal_error", "broken"])
def test_only_who_stands_by_itself_begins_anew_where_it_is(arm: Ticks, why: str) -> None:
    """After an error of the loop that braking took care of, the set-point stays."""
    arm.stopped()
    loop = arm.loop
    if why == "broken":
        loop.last_resort.stopped = True
    if why:
        setattr(loop, "internal_error" if why == "broken" else why, True)
    arm.heard_of.of(loop, "_begin_at_rest")
    arm.heard_of.of(loop, "_rest")
    loop._reset()
    assert arm.heard_of.count("_rest") == 1
    anew = why in ("_connection_failed", "_given_up", "broken")
    assert arm.heard_of.count("_begin_at_rest") == anew and loop.mode == Mode.IDLE
    assert not (loop._connection_failed or loop._given_up or loop.internal_error)


def test_one_joint_that_is_no_number_is_enough_not_to_continue(arm: Ticks) -> None:
    arm.stopped()
    read = arm.driver.read

    def one_joint_is_unknown() -> ArmState:
        state = read()
        state.q[2] = np.nan
        return state

    arm.driver.read = one_joint_is_unknown
    arm.loop._reset()
    assert arm.loop.mode == Mode.ESTOP


def test_a_measurement_that_is_no_number_is_nothing_to_continue_from(arm: Ticks) -> None:
    arm.stopped()
    arm.driver.lying = True
    arm.tick(Command.RESET)
    assert arm.mode == Mode.ESTOP
    arm.driver.lying = False
    arm.run(100)
    assert arm.tick(Command.RESET) and arm.mode == Mode.IDLE


def test_who_connects_is_checked_read_and_held(arm: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    arm.loop.mode = Mode.DISCONNECTED
    for name in ("connect", "check", "read"):
        arm.heard_of.of(arm.driver, name)
    arm.heard_of.of(arm.loop.chain, "check")
    arm.heard_of.of(arm.loop, "test_stop")
    kind, enabled = type(arm.loop.chain.stages[0]), []
    usual = kind.__call__

    def called(stage: Any, tick: Any) -> None:
        enabled.append(arm.loop.enabled.on)
        usual(stage, tick)

    monkeypatch.setattr(kind, "__call__", called)
    arm.heard_of.of(arm.loop, "_begin_at_rest")
    arm.driver.goal = arm.driver.q + 0.05
    counts = arm.loop.chain.counts.copy()
    arm.loop.connect()
    assert (arm.loop.chain.counts == counts).all(), "the test of the stop is no event"
    assert enabled == [True], "the stop is tested on an arm that is enabled"
    order = ["connect", "check", "check", "read", "_begin_at_rest", "test_stop", "_begin_at_rest"]
    assert [name for name, _ in arm.heard_of.calls] == order
    assert arm.heard_of.calls[1][1] == (arm.loop.chain.limiter.limits,)
    assert arm.loop.mode == Mode.IDLE and arm.loop.fault == "" and not arm.loop.enabled.on
    assert np.abs(arm.loop.chain.limiter.q - arm.driver.q).max() < 1e-9


@pytest.mark.parametrize("broken", ["a joint moves", "no stop", "no fault"])
def test_a_stop_that_does_not_hold_is_no_connection(
    arm: Ticks, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    loop = arm.loop
    rest = loop.chain.limiter.q.copy()
    if broken == "a joint moves":
        sent = rest + 1e-8 * np.eye(5)[2]
        monkeypatch.setattr(type(loop.chain), "__call__", lambda *args: sent)
    elif broken == "no stop":
        loop._check_emergency_stop = lambda now: setattr(loop.chain, "fault", "a fault")
    else:
        loop._check_emergency_stop = lambda now: setattr(loop, "mode", Mode.ESTOP)
        monkeypatch.setattr(type(loop.chain), "__call__", lambda *args: rest)
    with pytest.raises(DriverError, match="the stop test failed"):
        loop.test_stop()
    assert not loop.enabled.on


def test_who_begins_at_rest_forgets_what_the_hand_held_and_senses_anew(arm: Ticks) -> None:
    loop = arm.loop
    arm.heard_of.of(loop.chain.hand, "forget")
    loop._begin_at_rest(loop.arm, loop.arm.q)
    assert arm.heard_of.count("forget") == 1
    loop.enabled.on = loop._home_pending = True
    loop.chain.hand.begin = lambda width: 0.04
    loop._rest(loop.arm, arm.now)
    assert not loop.enabled.on and not loop._home_pending and loop.width == 0.04
    arm.driver.sense = lambda: np.array([0.5])
    loop._measure()
    assert loop._sensed.tolist() == [0.5]


def test_an_arm_that_measures_no_force_is_refused(arm: Ticks) -> None:
    read = arm.driver.read
    arm.driver.read = lambda: replace(read(), external=None, force=None)
    with pytest.raises(DriverError, match="measures no external force"):
        arm.loop.connect()


def test_where_a_stopped_arm_follows(arm: Ticks) -> None:
    """It was measured `fresh.state` s ago or less, within limits.tracking of its set-point."""
    loop, tracking = arm.loop, np.asarray(arm.made.limits.tracking)
    loop.chain.limiter.begin(np.zeros(5))
    old = loop.fresh.config.state
    loop.arm = ArmState(tracking, 0 * tracking, 0 * tracking, 0.0)
    assert loop._follows(old) and not loop._follows(1.001 * old) and not loop._follows(-1.001 * old)
    loop.arm = ArmState(tracking * (1 + 1e-6 * np.eye(5)[2]), 0 * tracking, 0 * tracking, 0.0)
    assert not loop._follows(old)


def test_a_touched_arm_goes_back_at_once(arm: Ticks) -> None:
    arm.moving()
    arm.heard_of.of(arm.loop.yielding, "begin")
    before = arm.driver.q.copy()
    read = arm.driver.read
    arm.driver.read = lambda: replace(read(), force=np.array([1e3, 0.0, 0.0]))
    arm.tick()
    assert arm.mode == Mode.ESTOP and "pushes on the tool" in arm.loop.fault
    assert {"moving": True, "pause": LET_GO} in arm.heard_of.settings
    ahead = arm.there.state.fields["sent"][0] - before
    assert arm.loop.chain.back is not None and np.abs(ahead).max() > 1e-4
    assert (arm.loop.chain.limiter.q == arm.loop.chain.back).all()


def test_where_it_lets_go_is_inside_of_the_limits_and_above_its_droop(arm: Ticks) -> None:
    loop = arm.loop
    limiter = loop.chain.limiter
    loop.droop = lambda q: np.full(5, 0.01)
    middle = (limiter.low + limiter.high) / 2
    assert loop._let_go(middle, arm.now) == pytest.approx(middle + 0.01)
    assert (loop._let_go(limiter.low - 1, arm.now) == limiter.low).all()
    assert (loop._let_go(limiter.high + 1, arm.now) == limiter.high).all()


def test_the_way_home_begins_once_the_arm_has_yielded(arm: Ticks) -> None:
    loop = arm.loop
    arm.heard_of.of(loop.homing, "begin")
    loop._yield(arm.now)
    loop._home_pending = True
    loop.yielding.begin(loop.chain.limiter.q, arm.now + 10, moving=True)
    loop._yield(arm.now)
    assert loop._home_pending and arm.heard_of.count("begin") == 0
    homing, loop.homing = loop.homing, None
    loop.yielding.begin(loop.chain.limiter.q, arm.now, moving=False)
    loop._yield(arm.now)
    loop.homing = homing
    assert loop._home_pending
    loop._yield(arm.now)
    assert not loop._home_pending and loop.enabled.on and arm.heard_of.count("begin") == 1


def test_the_way_home_ends_at_its_last_set_point(arm: Ticks) -> None:
    loop = arm.loop
    loop.chain.limiter.begin(np.zeros(5))
    loop.mode = Mode.HOMING
    for point in (
        SetPoint(np.zeros(5), last=False),
        SetPoint(1.001 * NEAR * np.eye(5)[1], last=True),
    ):
        loop._end_homing(point, arm.now)
        assert loop.mode == Mode.HOMING
    arm.heard_of.of(loop.yielding, "wait")
    loop._end_homing(SetPoint(np.full(5, NEAR), last=True), arm.now)
    assert loop.mode == Mode.IDLE and arm.heard_of.count("wait") == 1


def test_a_hand_that_stays_is_wanted_there_but_not_on_the_way_home(arm: Ticks) -> None:
    loop = arm.loop
    loop.chain.hand.stay = lambda width, latched: 0.03
    loop.width, loop.mode, loop._waiting = 0.01, Mode.HOMING, True
    assert loop._limited_width() == 0.03 and loop.width == 0.01
    loop.mode = Mode.IDLE
    assert loop._limited_width() == 0.03 and loop.width == 0.03


def test_what_is_said_of_the_source_and_the_rate(arm: Ticks) -> None:
    loop, rate = arm.loop, Rate(100.0)
    arm.heard_of.of(loop.writer, "followed")
    for loop.mode, loop._waiting in ((Mode.IDLE, False), (Mode.RUNNING, True)):
        loop._publish(arm.now, None)
    loop.mode, loop._waiting, rate.missed = Mode.RUNNING, False, 7
    loop._publish(arm.now, rate)
    assert [moves for _, (_, moves) in arm.heard_of.calls] == [False, False, True]
    arm.there.state.receive()
    assert arm.there.state.fields["missed"][0] == 7


def test_what_is_published(arm: Ticks) -> None:
    arm.moving()
    state = arm.there.state.fields[0]
    assert state["q"] == pytest.approx(arm.driver.q) and state["tick"] == arm.loop.writer.ticks
    assert state["sent"] == pytest.approx(arm.loop.chain.limiter.q)
    assert (state["proposed"] == arm.loop.source.point.q).all()
    assert np.abs(state["proposed"] - state["sent"]).max() > 1e-4, "it is on the way there"
    arm.on["daemon"] = False
    arm.run(round((arm.made.heartbeat.hold + 0.8) / arm.dt))
    assert np.abs(arm.there.state.fields["proposed"][0] - state["sent"]).max() < 1.0


def raises(*args: Any) -> Any:
    """A part of the loop with a mistake."""
    raise ValueError("a bug")


def test_an_error_of_a_tick_is_latched_and_ends_the_episode(arm: Ticks) -> None:
    arm.moving()
    assert arm.loop.enabled.on
    arm.loop.source.move = raises
    arm.tick()
    assert arm.loop.internal_error and arm.mode == Mode.ESTOP and not arm.loop.enabled.on
    assert "ValueError: a bug" in arm.loop.fault and arm.loop.chain.fault == arm.loop.fault
    assert arm.there.state.fields["ended"][0] == Ended.FAULT
    arm.loop.fault = arm.loop.chain.fault = "the first"
    arm.loop._latch_internal_error(ValueError("the second"))
    assert arm.loop.fault == arm.loop.chain.fault == "the first"
    arm.run(200)
    assert arm.loop.resting and not arm.loop.quit, "it waits for an operator"


def test_a_request_that_an_error_kept_from_its_answer_is_refused(arm: Ticks) -> None:
    arm.loop._apply = raises
    assert not arm.tick(Command.ARM) and arm.loop.internal_error
    fields = arm.there.state.fields
    assert fields["refused"][0] == arm.there.request.fields["number"][0]


def test_a_broken_loop_ends_once_the_arm_rests(arm: Ticks) -> None:
    arm.moving()
    arm.loop.source.move = raises
    arm.tick()
    arm.loop.quit_reason = "the terminal is gone"
    arm.tick()
    assert not arm.loop.quit and not arm.loop.resting
    ticks = 0
    while not arm.loop.quit:
        ticks += 1
        assert ticks < 300
        rested = arm.loop.resting
        arm.tick()
    assert rested and ticks > 2


def test_an_arm_is_braked_to_where_it_was_measured(arm: Ticks) -> None:
    arm.moving()
    arm.loop.source.move = raises
    arm.tick()
    measured = arm.loop.arm.q.copy()
    ahead = np.abs(arm.loop.chain.limiter.q - measured).max()
    arm.run(200)
    assert ahead > 1e-3 and np.abs(arm.loop.chain.limiter.q - measured).max() < 1e-6


def test_a_released_arm_is_held_again_after_an_error(arm: Ticks) -> None:
    arm.tick(Command.RELEASE)
    arm.heard_of.of(arm.driver, "engage")
    arm.driver.read = raises
    arm.tick()
    assert arm.heard_of.count("engage") == 1 and not arm.loop.last_resort.stopped
    del arm.driver.read
    arm.tick(Command.RESET)
    arm.tick(Command.RELEASE)
    arm.driver.engage = arm.driver.read = raises
    arm.heard_of.of(arm.driver, "halt", lambda: None)
    arm.heard_of.of(arm.driver, "hold")
    arm.tick()
    assert arm.heard_of.count("halt") == 1 and arm.loop.last_resort.stopped
    assert arm.heard_of.count("hold") == 0


def test_what_braking_sends(arm: Ticks) -> None:
    """One step a tick, by the limiter; after it failed nothing, until the next error."""
    resort, limiter = arm.loop.last_resort, arm.loop.chain.limiter
    here = limiter.q.copy()
    assert not resort.stopped and resort.resting
    arm.heard_of.of(arm.driver, "hold")
    state = ArmState(here + 0.1, 0 * here, 0 * here, 0.0)
    resort.begin(ValueError(), state, released=False)
    resort.mark()
    resort._sent[0] += 1e-3  # one joint of this tick's set-point has moved
    resort.brake(0.0)
    assert (limiter.q == here).all() and arm.heard_of.count("hold") == 1
    resort.mark()
    resort.brake(0.0)
    assert (limiter.q != here).all() and not resort.resting
    hand = arm.loop.chain.hand
    hand.force = 2 * REST_FORCE
    arm.heard_of.of(hand, "stay")
    resort.mark()
    resort.brake(0.0)
    assert arm.heard_of.count("stay") == 1 and hand.force == REST_FORCE
    assert {"latched": True} in arm.heard_of.settings
    limiter.unguarded = raises
    resort.mark()
    resort.brake(0.0)
    assert resort._aim is None, "braked where it is"
    arm.driver.hold = raises
    resort.brake(0.0)
    assert resort.stopped and resort.resting
    arm.heard_of.of(arm.driver, "hold")
    resort.brake(0.0)
    assert arm.heard_of.count("hold") == 4, "nothing is sent any more"
    resort.begin(ValueError(), None, released=False)
    assert not resort.stopped and resort._aim is None


@pytest.mark.parametrize("wrong", ["one is no number", "none is a number", "too few"])
def test_what_was_not_measured_is_no_aim(arm: Ticks, wrong: str) -> None:
    q = arm.loop.chain.limiter.q.copy()
    resort = arm.loop.last_resort
    assert (resort._measured(ArmState(q, q, q, 0.0)) == q).all()
    q = {"one is no number": np.where(np.arange(5) == 2, np.nan, q), "too few": q[:3]}.get(
        wrong, np.full(5, np.nan)
    )
    assert resort._measured(ArmState(q, q, q, 0.0)) is None
    assert resort._measured(None) is None


def test_an_error_is_one_line_that_names_where_it_was_raised() -> None:
    try:
        raises()
    except ValueError as error:
        line = describe(error)
    number = raises.__code__.co_firstlineno + 2
    assert line.endswith(f"ValueError: a bug (test_loop.py:{number})")
    assert describe(DriverError("no cable")) == "no cable"
    long = describe(ValueError("word " * 1000))
    assert len(long) <= TEXT and long.startswith("internal error in the control loop: ValueError")
