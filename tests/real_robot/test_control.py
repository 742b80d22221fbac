"""The control process, turn by turn, on a simulated arm and a clock that the test moves."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest

from embodied.embodiments import fr3
from embodied.embodiments.cartesian_delta import CartesianDelta
from embodied.embodiments.cartesian_delta import Config as CartesianConfig
from embodied.embodiments.controller import Reference
from embodied.real_robot.control.chunk_follower import Chunk, ChunkFollower, control_loop
from embodied.real_robot.drivers.sim import Config as SimConfig
from embodied.real_robot.drivers.sim import Sim
from embodied.real_robot.ipc.channels import Channels, Role
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.chain import Chain, Stage
from embodied.real_robot.kernel.checks import Enabled, Finite, Fresh, FreshConfig, Torque, Tracking
from embodied.real_robot.kernel.driver import (
    ArmDriver,
    DriverError,
    StopCategory,
    droop_of,
    springs_of,
    stiffen,
    unloaded,
)
from embodied.real_robot.kernel.hand import HandLimiter
from embodied.real_robot.kernel.limiter import Limiter
from embodied.real_robot.kernel.messages import Command, Mode

DT, STEP = 0.01, 0.05
LIMITS = Limits(
    low=tuple(fr3.LOWER),
    high=tuple(fr3.UPPER),
    margin=(0.05,) * 7,
    velocity=tuple(0.8 * fr3.VELOCITY),
    acceleration=(8.0,) * 7,
    jerk=(1000.0,) * 7,
    torque=tuple(fr3.TORQUE),
    tracking=(0.3,) * 7,
)
DOWN = np.array([0.0, 0.0, -1.0, 1.0])


class Bench:
    """An arm, its control process, a policy that says `action`, and an operator."""

    def __init__(self, folder: Path, hand: HandLimiter | None = None, **wire: float) -> None:
        self.now = 1000.0
        self.driver = Sim(SimConfig(**wire), lambda: self.now)  # pyright: ignore[reportArgumentType]
        fresh = Fresh(FreshConfig(hold=0.2, stop=0.5, state=0.1))
        stages = [Finite(), fresh, Enabled(), Torque(LIMITS), Tracking(LIMITS)]
        chain = Chain([*stages, *self.further()], Limiter(LIMITS, DT), hand)
        follower = ChunkFollower(CartesianDelta(CartesianConfig()), STEP)
        self.here = Channels.make(folder, 7, len(chain.names))
        self.there = Channels.open(folder, 7, len(chain.names), role=Role.ALL)
        self.control = control_loop(self.driver, chain, follower, self.here, lambda: self.now)
        self.action: Floats | None = None
        self.sent: list[Floats] = []
        self.control.connect()

    def further(self) -> list[Stage]:
        """Stages of the chain beyond the usual ones."""
        return []

    def request(self, wish: Command) -> None:
        fields = self.there.request.fields
        fields["number"] += 1
        fields["command"] = wish
        fields["stop"] = self.there.estop.number  # which this operator has seen
        self.there.request.send()

    def ask(self, wish: Command) -> Mode:
        """What the operator sees one turn later."""
        self.request(wish)
        self.run(1)
        return self.mode

    @property
    def refused(self) -> bool:
        """Whether the newest request was refused."""
        return bool(self.there.state.fields["refused"][0] == self.there.request.fields["number"][0])

    @property
    def mode(self) -> Mode:
        return Mode(int(self.there.state.fields["mode"][0]))

    @property
    def fault(self) -> str:
        return self.there.state.fields["fault"][0].decode()

    @property
    def reason(self) -> str:
        """Why the newest request was refused."""
        return self.there.state.fields["reason"][0].decode()

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.now += DT
            if self.action is not None and round(self.now / DT) % round(STEP / DT) == 0:
                self.speak(self.action)
            self.control.turn()
            assert self.there.state.receive()
            self.sent.append(self.there.state.fields["sent"][0].copy())

    def speak(self, action: Floats, steps: int = 4) -> None:
        fields = self.there.chunk.fields[0]
        fields["number"] += 1
        fields["seen"] = self.there.state.fields["measured"][0] if self.sent else self.now
        fields["start"], fields["steps"], fields["size"] = self.now, steps, len(action)
        fields["actions"][:steps, : len(action)] = action
        self.there.chunk.send()

    def moving(self) -> None:
        """Armed, started and going down."""
        self.action = DOWN
        self.run(10)
        assert self.ask(Command.ARM) == Mode.ARMED
        self.run(10)
        assert self.ask(Command.START) == Mode.RUNNING
        self.run(50)


def within(sent: list[Floats]) -> None:
    q = np.stack(sent)
    for order, most in enumerate((LIMITS.velocity, LIMITS.acceleration, LIMITS.jerk), 1):
        q_n = np.abs(np.diff(q, order, axis=0)) / DT**order
        assert (q_n <= np.asarray(most) * (1 + 1e-6) + 1e-5).all()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_it_moves_only_when_it_was_armed_and_started(bench: Bench) -> None:
    bench.action = DOWN
    bench.run(50)
    assert bench.mode == Mode.IDLE and np.ptp(np.stack(bench.sent), axis=0).max() == 0
    assert bench.ask(Command.START) == Mode.IDLE, "not armed"
    assert bench.there.state.fields["refused"][0] == 1
    before = fr3.forward(bench.sent[-1][None])[0][0, 2]
    bench.moving()
    after = fr3.forward(bench.sent[-1][None])[0][0, 2]
    # 0.5 m/s for half a second, less what the lead before the measured tool holds back.
    assert before - after == pytest.approx(0.25 * 0.55, abs=0.05)
    assert bench.ask(Command.STOP) == Mode.STOPPING
    bench.run(60)
    assert bench.mode == Mode.IDLE and not bench.fault
    within(bench.sent)


def test_without_a_policy_it_does_not_start(bench: Bench) -> None:
    assert bench.ask(Command.ARM) == Mode.ARMED
    assert bench.ask(Command.START) == Mode.ARMED
    bench.action = DOWN
    bench.run(10)
    bench.action = None
    bench.run(30)
    assert bench.ask(Command.START) == Mode.ARMED, "what it said last is too old"


def test_a_silent_policy_is_held_and_then_a_latched_stop(bench: Bench) -> None:
    bench.moving()
    bench.action, silent = None, len(bench.sent)
    bench.run(35)
    assert bench.mode == Mode.RUNNING
    bench.run(20)
    assert bench.mode == Mode.ESTOP and "observation is 0.5" in bench.fault
    rest = np.stack(bench.sent[silent + 60 // 2 :])
    assert np.ptp(rest[10:], axis=0).max() < 0.02, "held from 0.2 s on"
    bench.action = DOWN
    bench.run(20)
    for wish in (Command.ARM, Command.START):
        assert bench.ask(wish) == Mode.ESTOP, "a new command does not clear it"
    assert bench.ask(Command.RESET) == Mode.IDLE and not bench.fault
    bench.moving()
    within(bench.sent[:silent])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_action_that_is_not_a_number_stops_the_arm(bench: Bench, bad: float) -> None:
    bench.moving()
    bench.action = np.array([0.0, bad, 0.0, 1.0])
    bench.run(60)
    assert bench.mode == Mode.ESTOP and "finite" in bench.fault
    within(bench.sent)
    assert np.ptp(np.stack(bench.sent[-5:]), axis=0).max() == 0


def test_delay_and_lost_reads_are_survived_up_to_the_limit(tmp_path: Path) -> None:
    for name in ("good", "late", "broken"):
        (tmp_path / name).mkdir()
    good = Bench(tmp_path / "good", noise=1e-4)
    delayed(good, 0.03, lost=0.2)
    good.moving()
    assert good.mode == Mode.RUNNING, good.fault
    assert good.ask(Command.ESTOP) == Mode.ESTOP
    assert good.ask(Command.RESET) == Mode.ESTOP, "still moving"
    late = Bench(tmp_path / "late")
    delayed(late, 0.15)
    late.run(30)
    assert late.mode == Mode.ESTOP and "last seen" in late.fault
    broken = Bench(tmp_path / "broken")
    broken.moving()
    broken.driver.connected = False
    broken.run(1)
    assert broken.mode == Mode.ESTOP and "not connected" in broken.fault
    assert broken.ask(Command.RESET) == Mode.ESTOP


def delayed(bench: Bench, delay: float, lost: float = 0.0) -> None:
    """Its measurements come `delay` s late, and a share of the reads gets an old one."""
    read, random, kept = bench.driver.read, bench.driver.random, deque[ArmState]()

    def late() -> ArmState:
        kept.append(read())
        got = random.random() >= lost
        while len(kept) > 1 and got and kept[1].t <= bench.now - delay:
            kept.popleft()
        return kept[0]

    bench.driver.read = late


class Sum:
    """A controller whose joint target is the sum of its actions; the hand stays."""

    def __init__(self, *names: str) -> None:
        self.names: tuple[str, ...] = names

    def begin(self, q: Floats, width: Floats) -> Reference:
        return {"q": q, "width": width}

    def __call__(
        self, action: Floats, q: Floats, reference: Reference
    ) -> tuple[Floats, Floats, Reference]:
        target = reference["q"] + action
        return target, reference["width"], {**reference, "q": target}


def follower(blend: int = 2, grace: int = 0) -> ChunkFollower:
    made = ChunkFollower(Sum("a"), dt=1.0, blend=blend, grace=grace)
    made.begin(np.zeros(1), 0.0, now=10.0)
    return made


def targets(made: ChunkFollower, times: list[float]) -> list[float]:
    out, seen = np.zeros(1), []
    for now in times:
        made(np.zeros(1), now, out)
        seen.append(float(out[0]))
    return seen


def test_a_clock_that_goes_back_does_not_stop_the_simulation() -> None:
    now = [3600.0]
    with Sim(SimConfig(), lambda: now[0]) as arm:
        now[0] = 0.0
        target = arm.read().q + 0.1
        for _ in range(100):
            now[0] += DT
            arm.write(target, 0.0)
        assert arm.read().q == pytest.approx(target, abs=0.02)


def test_the_clock_says_which_action() -> None:
    made = follower()
    made.take(Chunk(np.array([[1.0], [10.0], [100.0]]), start=9.0, seen=8.5))
    # The chunk began a second before we did: its first action is over, 10 and 100 are left.
    assert targets(made, [10.0, 10.5, 11.0, 11.5, 12.0]) == [0, 5, 10, 60, 110]
    assert made.starved and targets(made, [12.9]) == [110], "nothing left: it stays"
    patient = follower(grace=1)
    patient.take(Chunk(np.array([[5.0]]), start=9.4, seen=9.4))
    assert targets(patient, [10.0, 11.0, 12.0]) == [0, 5, 5], "a little late, and then no more"


def test_while_the_tool_is_slow_the_clock_stands_still() -> None:
    made, out, seen = follower(), np.zeros(1), []
    made.take(Chunk(np.array([[1.0], [10.0], [100.0]]), start=10.0, seen=9.9))
    for k in range(13):
        made(np.zeros(1), 10.0 + 0.5 * k, out, slowed=k in (2, 3, 7))
        seen.append(float(out[0]))
    assert seen == [0.0, 0.5, 0.5, 0.5, 1.0, 6.0, 11.0, 11.0, 61.0, 111.0, 111.0, 111.0, 111.0]
    assert made.paused == 1.5


def test_a_late_chunk_is_entered_where_it_would_be_by_now_and_blended_in() -> None:
    made = follower(blend=2)
    made.take(Chunk(np.full((9, 1), 3.0), start=10.0, seen=9.9))
    newer = Chunk(np.arange(0.0, 90, 10)[:, None], start=10.0, seen=10.1)
    steps = targets(made, [10.0, 11.0])
    made.take(newer)
    steps += targets(made, [12.0, 13.0, 14.0, 15.0, 16.0])
    # Step 12 is the newer chunk's third action, 20: blended 1/3 and 2/3, then it alone.
    blended = [2 / 3 * 3 + 1 / 3 * 20, 1 / 3 * 3 + 2 / 3 * 30]
    assert np.diff(steps).tolist() == pytest.approx([3, 3, *blended, 40, 50])
    made.take(Chunk(np.zeros((9, 1)), start=10.0, seen=9.0))
    assert made.seen == 10.1, "an older chunk that comes late is not followed"


@pytest.mark.parametrize("phase", [0.1, 0.3, 0.6, 0.9])
def test_single_actions_are_followed_as_they_are(phase: float) -> None:
    """What goes on for a little because the next is late is no plan to blend the next with."""
    made = follower(blend=2, grace=1)
    acted: list[float] = []
    for k in range(1, 6):  # decided `phase` of a step before it begins
        at = 10.0 + k - phase
        made.take(Chunk(np.full((1, 1), float(k)), start=at, seen=at))
        targets(made, [10.0 + k])
        acted.append(float(made.action[0]))
    assert acted == [1, 2, 3, 4, 5]


class Plain(ArmDriver):
    """A driver without a method more than it needs."""

    def __init__(self) -> None:
        self.joints, self.done = ("one",), list[str]()

    def connect(self) -> None: ...

    def read(self) -> ArmState:
        return ArmState(np.zeros(1), np.zeros(1), np.zeros(1), 0.0)

    def write(self, q: Floats, width: float) -> None:
        self.done.append(f"write {q[0]:g} {width:g}")

    @property
    def width(self) -> float:
        return 0.0

    def stop(self) -> None:
        self.done.append("stop")

    def close(self) -> None: ...


class Sagging(Plain):
    """Its arm sags, and its springs can be set."""

    springs, stiffness = None, None

    def droop(self, q: Floats) -> Floats:
        return q / 2

    def unloaded(self, stretch: Floats) -> None:
        self.done.append(f"unloaded {stretch[0]:g}")

    def stiffen(self, stiffness: Floats) -> None:
        self.done.append(f"stiffen {stiffness[0]:g}")


def test_what_a_driver_does_without_a_method_of_its_own() -> None:
    arm, sagging, one = Plain(), Sagging(), np.ones(1)
    assert arm.hold(one, 0.5) and arm.halt() == StopCategory.HELD
    assert arm.done == ["write 1 0.5", "stop"] and arm.sense().size == 0
    assert droop_of(arm)(one) == 0.0 and droop_of(sagging)(one) == 0.5
    unloaded(arm, one)
    unloaded(sagging, one)
    with pytest.raises(DriverError, match="Plain cannot change its stiffness"):
        stiffen(arm, one)
    stiffen(sagging, 2 * one)
    assert springs_of(arm) is None
    assert sagging.done == ["unloaded 1", "stiffen 2"] and len(arm.done) == 2
