"""A tick that raises, whatever raises in it: latched in one line, braked within the limits, and the
process goes on. The emergency stop that needs no daemon."""

from __future__ import annotations

import gc
import stat
import weakref
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.real_robot.control.homing import Homing
from embodied.real_robot.kernel.arm_state import ArmState
from embodied.real_robot.kernel.channels import EmergencyStop
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.mailbox import MailboxError
from embodied.real_robot.kernel.messages import Command, Ended, Mode
from embodied.real_robot.kernel.rate import Rate
from tests.real_robot.chunk_fuzz import fuzz
from tests.real_robot.test_control import DOWN, DT, LIMITS, Bench, within
from tests.real_robot.test_homing import AWAY
from tests.real_robot.test_yielding import MOST, SECOND, Pressing


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """An arm that moves."""
    bench = Bench(tmp_path)
    bench.moving()
    return bench


class Broken:
    """Raises whenever it is called."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.calls = error, 0

    def __call__(self, *args: object, **settings: object) -> Any:
        self.calls += 1
        raise self.error


def short(read: Callable[[], ArmState]) -> Callable[[], ArmState]:
    """A driver that measures a joint too few."""

    def wrong() -> ArmState:
        arm = read()
        return ArmState(arm.q[:6], arm.dq[:6], arm.tau[:6], arm.t)

    return wrong


PARTS: dict[str, tuple[str, str]] = {
    "controller": ("source.follower", "controller"),
    "source": ("", "source"),
    "follower": ("source", "follower"),
    "stage": ("chain", "stages"),
    "planner": ("chain.limiter", "_follow"),
    "state message": ("", "_publish"),
    "write": ("driver", "write"),
    "measurement": ("driver", "read"),
    "shape": ("driver", "read"),
}


@pytest.mark.parametrize("where", PARTS)
def test_a_tick_that_raises_is_a_latched_stop_within_the_limits(
    bench: Bench, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """What raised is not run again before a reset, also not a stage, which runs in every mode."""
    path, name = PARTS[where]
    owner = attrgetter(path)(bench.control) if path else bench.control
    whole, broken = getattr(owner, name), Broken(ValueError("operands could not\nbe broadcast"))
    setattr(owner, name, {"stage": [broken], "shape": short(whole)}.get(where, broken))
    bench.run(6)
    assert bench.mode == Mode.ESTOP
    assert bench.fault.startswith("internal error in the control loop: ")
    assert "Error: " in bench.fault and ".py:" in bench.fault and "\n" not in bench.fault
    bench.run(150)
    if where != "write":  # which fails while braking as well: the driver stops then
        within(bench.sent)
    assert np.ptp(np.stack(bench.sent[-5:]), axis=0).max() < 1e-9, "at rest"
    said = [line for line in capfd.readouterr().err.splitlines() if "internal error" in line]
    assert len(said) == (2 if where == "write" else 1), "logged once"
    assert bench.ask(Command.START) == Mode.ESTOP and bench.refused, "it answers"
    if where in ("controller", "stage", "planner"):
        assert broken.calls == 1 + (where == "planner")  # which brakes once by another way
        setattr(owner, name, whole)
        assert bench.ask(Command.RESET) == Mode.IDLE and not bench.fault
        bench.run(50)  # the set-point yields to where the arm was braked
        bench.moving()
        assert bench.mode == Mode.RUNNING
        bench.ask(Command.ESTOP)
        bench.run(100)
    bench.ask(Command.QUIT)
    assert bench.control.quit


def test_a_reset_that_raises_is_latched_again(bench: Bench) -> None:
    control: Any = bench.control
    follower = control.source.follower
    whole, follower.controller = follower.controller, Broken(IndexError("bug"))
    bench.run(100)
    recover, control.driver.recover = control.driver.recover, Broken(KeyError("again"))
    assert bench.ask(Command.RESET) == Mode.ESTOP and bench.refused
    control.driver.recover, follower.controller = recover, whole
    bench.run(20)
    assert bench.ask(Command.RESET) == Mode.IDLE


def test_a_driver_that_cannot_be_braked_either_is_told_to_stop(bench: Bench) -> None:
    control: Any = bench.control
    stop, stopped = control.driver.stop, []
    control.driver.stop = lambda: stopped.append(stop())
    control.driver.write = Broken(TypeError("bug"))
    bench.run(30)
    assert bench.mode == Mode.ESTOP and "TypeError: bug" in bench.fault
    assert stopped == [None], "once"
    assert control.driver.write.calls == 2, "the tick that raised, and one that brakes"
    del control.driver.write
    assert bench.ask(Command.RESET) == Mode.IDLE
    assert bench.sent[-1] == pytest.approx(control.arm.q, abs=0.02), "from where the arm stands"


def test_a_driver_error_anywhere_is_the_drivers_fault(bench: Bench) -> None:
    bench.ask(1_000_000)  # pyright: ignore[reportArgumentType]
    assert bench.mode == Mode.RUNNING and bench.refused, "a command that nobody knows"
    control: Any = bench.control
    control.driver.stiffen = control.driver.write = Broken(DriverError("the cable is gone"))
    bench.run(3)
    assert bench.mode == Mode.ESTOP and bench.fault == "the cable is gone"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_process_ends_it(bench: Bench, error: type[BaseException]) -> None:
    control: Any = bench.control
    control.source.move = Broken(error())
    with pytest.raises(error):
        bench.run(2)


@pytest.mark.parametrize("mode", [Mode.IDLE, Mode.ARMED, Mode.RUNNING, Mode.HOMING, Mode.STOPPING])
def test_an_emergency_stop_needs_no_daemon(tmp_path: Path, mode: Mode) -> None:
    bench = Bench(tmp_path)
    bench.control.homing = Homing(AWAY, LIMITS)
    if mode in (Mode.RUNNING, Mode.STOPPING):
        bench.moving()
    bench.run(2)
    wishes = {Mode.ARMED: Command.ARM, Mode.HOMING: Command.HOME, Mode.STOPPING: Command.STOP}
    bench.ask(wishes.get(mode, Command.NOTHING))
    bench.run(5)
    assert bench.mode == mode
    button = EmergencyStop(tmp_path / "estop", write=True)
    button.press()
    bench.run(1)
    assert bench.mode == Mode.ESTOP and bench.fault == "an operator pressed stop"
    bench.run(150)
    within(bench.sent)
    for wish in (Command.ARM, Command.START, Command.HOME, Command.STOP):
        assert bench.ask(wish) == Mode.ESTOP
    assert bench.ask(Command.RESET) == Mode.IDLE
    bench.run(10)
    assert bench.mode == Mode.IDLE and not bench.fault
    button.press()
    bench.run(1)
    assert bench.mode == Mode.ESTOP, "and again"


def test_a_press_between_two_ticks_of_a_reset_counts(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(2)
    button = EmergencyStop(tmp_path / "estop", write=True)
    button.press()
    bench.run(60)
    button.press()
    recover = bench.driver.recover

    def pressed() -> None:
        recover()
        button.press()  # while the arm recovers, which may take seconds

    bench.driver.recover = pressed
    bench.ask(Command.RESET)
    bench.run(1)
    assert bench.mode == Mode.ESTOP and bench.fault == "an operator pressed stop"


def test_a_press_is_never_lost_to_a_reset(tmp_path: Path) -> None:
    """P-4: pressed in the tick of a reset, after the flag was looked at; and a reset of an operator
    who has seen an earlier press only."""
    bench = Bench(tmp_path)
    bench.run(2)
    button = EmergencyStop(tmp_path / "estop", write=True)
    button.press()
    bench.run(60)
    control: Any = bench.control
    handle = control._handle_request

    def pressed(now: float) -> None:
        button.press()
        handle(now)

    control._handle_request = pressed
    assert bench.ask(Command.RESET) == Mode.ESTOP and bench.refused
    assert "pressed again" in bench.reason
    control._handle_request = handle
    bench.request(Command.RESET)
    button.press()  # after that operator looked
    bench.run(1)
    assert bench.mode == Mode.ESTOP and bench.refused
    assert bench.ask(Command.RESET) == Mode.IDLE, "of one who has seen them all"


def test_an_emergency_stop_while_the_arm_brakes_after_an_error(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    cut: list[None] = []
    bench.driver.cut = lambda: cut.append(None)
    bench.moving()
    control: Any = bench.control
    control.source.follower.controller = Broken(IndexError("bug"))
    bench.run(10)
    bench.here.estop.press()
    bench.run(100)
    assert bench.mode == Mode.ESTOP and "IndexError" in bench.fault and len(cut) == 1
    within(bench.sent)


def test_the_button_is_private_and_says_when_it_is_not_there(tmp_path: Path) -> None:
    made = EmergencyStop(tmp_path / "estop", create=True)
    assert stat.S_IMODE((tmp_path / "estop").stat().st_mode) == 0o600
    assert (tmp_path / "estop").stat().st_size == 8 and made.number == 0
    other = EmergencyStop(tmp_path / "estop", write=True)
    other.press()
    numbers = [made.number]
    for _ in range(3):
        other.press()
        numbers.append(made.number)
    assert 0 < numbers[0] < numbers[1] < numbers[2] < numbers[3], "a new number at every press"
    with pytest.raises(FileExistsError):
        EmergencyStop(tmp_path / "estop", create=True)
    with pytest.raises(MailboxError, match="is not there"):
        EmergencyStop(tmp_path / "none")
    (tmp_path / "long").write_bytes(b"x" * 9)
    with pytest.raises(MailboxError, match="another version"):
        EmergencyStop(tmp_path / "long")


def test_an_episode_ends_by_itself_when_its_time_is_over(tmp_path: Path) -> None:
    """The terminal and the daemon that asked for it may both hang."""
    bench = Bench(tmp_path)

    def ended() -> Ended:
        return Ended(int(bench.there.state.fields["ended"][0]))

    def start(seconds: float) -> Mode:
        bench.action = DOWN
        bench.run(10)
        bench.ask(Command.ARM)
        bench.run(10)
        bench.there.request.fields["seconds"] = seconds
        return bench.ask(Command.START)

    for nonsense in (-1.0, np.nan, np.inf):
        assert start(nonsense) == Mode.ARMED, "refused"
        assert bench.ask(Command.STOP) in (Mode.STOPPING, Mode.IDLE)
        bench.run(5)
    assert start(0.3) == Mode.RUNNING and ended() == Ended.NOTHING
    bench.run(28)
    assert bench.mode == Mode.RUNNING
    bench.run(3)
    assert bench.mode == Mode.STOPPING and ended() == Ended.TIME
    bench.run(100)
    assert bench.mode == Mode.IDLE and not bench.fault and ended() == Ended.TIME
    within(bench.sent)
    assert start(0.0) == Mode.RUNNING and ended() == Ended.NOTHING
    bench.run(300)
    assert bench.mode == Mode.RUNNING, "no limit"
    bench.ask(Command.STOP)
    bench.run(100)
    assert ended() == Ended.STOPPED
    assert start(10.0) == Mode.RUNNING
    bench.ask(Command.ESTOP)
    bench.run(100)
    assert ended() == Ended.FAULT


def test_an_arm_that_presses_lets_go_after_an_error_too(tmp_path: Path) -> None:
    bench = Pressing(tmp_path)
    bench.press()
    control: Any = bench.control
    control.source.follower.controller = Broken(IndexError("bug"))
    bench.run(6)
    assert bench.mode == Mode.ESTOP
    bench.run(3 * SECOND)
    assert max(bench.force[-2 * SECOND :]) < MOST, "N, from 1 s on"
    within(bench.sent)


NAN, INF = float("nan"), float("inf")
MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no numbers": ({"size": 0}, "0 numbers for 4 actions (dx, dy, dz, gripper)"),
    "fewer than no numbers": ({"size": -1}, "-1 numbers for 4 actions"),
    "a number too few": ({"size": 3}, "3 numbers for 4 actions"),
    "two numbers too many": ({"size": 6}, "6 numbers for 4 actions"),
    "more numbers than fit": ({"size": 33}, "33 numbers for 4 actions"),
    "as many numbers as can be": ({"size": 2**31 - 1}, "2147483647 numbers for 4 actions"),
    "no steps": ({"steps": 0}, "0 steps; 1 to 128"),
    "fewer than no steps": ({"steps": -3}, "-3 steps; 1 to 128"),
    "more steps than fit": ({"steps": 129}, "129 steps; 1 to 128"),
    "a million steps": ({"steps": 10**6}, "1000000 steps; 1 to 128"),
    "seen is not a number": ({"seen": NAN}, "seen=nan, which is not a time"),
    "seen is infinite": ({"seen": INF}, "seen=inf, which is not a time"),
    "seen is infinitely long ago": ({"seen": -INF}, "seen=-inf, which is not a time"),
    "seen in the future": ({"seen": 1e9}, "s from the future"),
    "start is not a number": ({"start": NAN}, "start=nan, which is not a time"),
    "start is infinite": ({"start": INF}, "start=inf, which is not a time"),
    "start is infinitely long ago": ({"start": -INF}, "start=-inf, which is not a time"),
    "start in the future": ({"start": 1e9}, "in the future"),
    "no stamp is a number": ({"seen": NAN, "start": NAN}, "seen=nan, which is not a time"),
    "less than no noise": ({"noise_size": -1}, "-1 numbers of noise"),
    "more noise than fits": ({"noise_size": 4097}, "4097 numbers of noise"),
    "an image of no time": ({"image_times": NAN}, "capture time of an image"),
}


def speak(bench: Bench, wrong: dict[str, Any]) -> None:
    """A chunk as it should be, but for what is `wrong`."""
    fields = bench.there.chunk.fields[0]
    fields["actions"], fields["noise_size"], fields["image_times"] = 0.0, 0, 0.0
    fields["number"] += 1
    fields["seen"] = bench.there.state.fields["measured"][0]
    fields["start"], fields["steps"], fields["size"] = bench.now, 4, len(DOWN)
    fields["actions"][:4, : len(DOWN)] = DOWN
    for name, value in wrong.items():
        fields[name] = value
    bench.there.chunk.send()
    fields["noise_size"], fields["image_times"] = 0, 0.0


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_chunk_is_dropped_or_a_latched_fault_in_one_line(
    tmp_path: Path, name: str
) -> None:
    """An idle arm drops it and is not started upon it, one that is armed or moves says why."""
    wrong, line = MALFORMED[name]
    bench = Bench(tmp_path)
    bench.run(10)
    speak(bench, wrong)
    bench.run(2)
    assert bench.mode == Mode.IDLE and not bench.fault
    bench.ask(Command.ARM)
    assert bench.ask(Command.START) == Mode.ARMED, "no chunk that could be followed has come"
    speak(bench, wrong)
    bench.run(1)
    assert bench.mode == Mode.ESTOP and line in bench.fault
    bench.run(50)
    assert bench.ask(Command.RESET) == Mode.IDLE
    bench.moving()
    bench.action = None
    speak(bench, wrong)
    bench.run(1)
    assert bench.mode == Mode.ESTOP
    assert line in bench.fault and "\n" not in bench.fault
    assert bench.fault.startswith("the policy's ")
    bench.run(150)
    within(bench.sent)
    assert np.ptp(np.stack(bench.sent[-5:]), axis=0).max() < 1e-3, "at rest"
    assert bench.ask(Command.RESET) == Mode.IDLE
    bench.moving()
    assert bench.mode == Mode.RUNNING, "the next good chunk is followed"


def test_stamps_of_long_ago_are_stale_and_no_other_fault(tmp_path: Path) -> None:
    """Where no stamp is a number, freshness is not switched off either."""
    for long_ago in (-1.7e308, -1e9, 0.0):
        folder = tmp_path / str(long_ago)
        folder.mkdir()
        bench = Bench(folder)
        bench.moving()
        bench.there.chunk.fields["number"] = -5  # a policy that is started again counts from 1
        bench.run(50)
        assert bench.mode == Mode.RUNNING
        bench.action = None
        speak(bench, {"seen": long_ago, "start": long_ago})
        bench.run(1)
        assert bench.mode == Mode.RUNNING, "older than what is followed: not followed"
        speak(bench, {"start": long_ago})
        bench.run(6)
        assert bench.mode == Mode.RUNNING and bench.there.state.fields["starved"][0]
        bench.run(100)
        assert bench.mode == Mode.ESTOP and "s old" in bench.fault
    bench.run(100)
    assert bench.ask(Command.RESET) == Mode.IDLE
    bench.moving()
    bench.action = None
    for _ in range(5):
        speak(bench, {"seen": NAN, "start": NAN})
        bench.run(5)
    bench.run(round(3.0 / DT))
    assert bench.mode == Mode.ESTOP and bench.fault
    within(bench.sent)


def test_random_chunk_records_neither_end_nor_fool_the_loop() -> None:
    """10^5 of them: `python -m tests.real_robot.chunk_fuzz 100000`."""
    made = fuzz(1500, seed=1)
    assert made.told["latched"] > 250 and made.told["dropped"] > 50
    assert made.told["followed"] > 50


class Counted(Rate):
    """A rate that does not sleep; `wait` calls `look` with the number of the tick."""

    def __init__(self, look: Callable[[int], None]) -> None:
        self.look, self.began = look, 0
        super().__init__(1 / DT, clock=lambda: 0.0)

    def begin(self) -> None:
        super().begin()
        self.began += 1

    def wait(self) -> float:
        self.ticks += 1
        self.look(self.ticks)
        return self.deadline


def test_ticks_run_without_the_garbage_collector_until_an_operator_quits(bench: Bench) -> None:
    control: Any = bench.control
    stopped: list[bool] = []
    control.driver.stop = lambda: stopped.append(gc.isenabled())
    before, ticks = gc.get_freeze_count(), control.writer.ticks
    cycle: Any = Broken(ValueError())
    cycle.itself, old = cycle, weakref.ref(cycle)
    del cycle

    def look(tick: int) -> None:
        assert not gc.isenabled() and gc.get_freeze_count() > before and old() is None
        assert control.writer.ticks == ticks + tick - 1
        control.quit = tick == 3

    rate = Counted(look)
    control.run(rate)
    assert rate.began == 2, "made, and begun anew"
    assert rate.ticks == 3 and control.writer.ticks == ticks + 3
    assert stopped == [True] and gc.isenabled()


def test_the_hardware_watchdog_hears_of_ticks_in_order_only(bench: Bench) -> None:
    control: Any = bench.control

    class Heard:
        fault, beats = "", 0

        def beat(self) -> None:
            self.beats += 1

    control.watchdog = Heard()
    bench.run(5)
    assert control.watchdog.beats == 5
    control.source.follower.controller = Broken(ValueError("bug"))
    bench.run(10)
    assert bench.mode == Mode.ESTOP
    heard = control.watchdog.beats
    bench.run(10)
    assert control.watchdog.beats == heard


def test_a_reason_is_of_the_newest_request_only(bench: Bench) -> None:
    bench.control.writer.explain("not that")
    bench.ask(Command.NOTHING)
    assert bench.reason == ""
