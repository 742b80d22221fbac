"""Timing of the robot control loop beside a policy that stalls; cost of servo bus reads.

The control process (simulated arm, safety chain, mailboxes, flight recorder) on absolute deadlines,
t_k = t_0 + k T, is compared with a loop that sleeps for the rest of its period after each
iteration, as robot learning loops do (SERL, 2024). Lateness is measured against the deadline or, in
the other loop, against the intended wake-up time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.command import main
from benchmarks.measure import Comparison, compare, table, write_json
from embodied.core.build import build
from embodied.core.checkpoint import save
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.embodiments import fr3
from embodied.real_robot.assemble import (
    build_control,
    open_channels,
    open_flight_recorder,
)
from embodied.real_robot.daemon.child import Child
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.servos.driver import Config as BusConfig
from embodied.real_robot.drivers.servos.driver import Joint, ServoBus
from embodied.real_robot.emulators.servos.bus import FakeBus, Faults
from embodied.real_robot.ipc.channels import Channels, Role
from embodied.real_robot.kernel.arm_state import Limits
from embodied.real_robot.kernel.checks import FreshConfig, Heartbeat
from embodied.real_robot.kernel.hand import Config as Hand
from embodied.real_robot.kernel.loop import ControlLoop
from embodied.real_robot.kernel.mailbox import memory_folder
from embodied.real_robot.kernel.messages import Command, Mode
from embodied.real_robot.kernel.rate import Rate, ahead_of_others

HERTZ = (100, 200, 500)
STEP, EVERY, STALL = 0.05, 1.5, 0.3  # s: of the policy; between two stalls; of each
P99, ERROR = {100: 0.2, 200: 0.5, 500: 0.5}, 0.05  # goals: ms, %
NAMES = (*(f"q{i}" for i in range(1, 8)), "tool_x", "tool_y", "tool_z", "width")
STATE = Leaf((len(NAMES),), names=NAMES)
SPEC = Spec({"state": STATE}, Leaf((4,), low=-1.0, high=1.0), dt=STEP)
SERVOS, TURNAROUND, BAUD = 6, 1e-3, 1_000_000
EDGES = np.array([0.0, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e9])  # of lateness, s
LIMITS = Limits(
    low=tuple(fr3.LOWER),
    high=tuple(fr3.UPPER),
    margin=(0.05,) * 7,
    velocity=tuple(0.5 * fr3.VELOCITY),
    acceleration=(8.0,) * 7,
    jerk=(1000.0,) * 7,
    torque=(1e3,) * 7,
    tracking=(9.0,) * 7,
)


@dataclass(frozen=True)
class Row:
    """A loop at `hertz`: iterations and `missed` deadlines, `stalled` of them during policy stalls;
    `error` of the rate (%); lateness in ms and its histogram `counts` over `EDGES`."""

    loop: str
    hertz: int
    rate: float
    ticks: int
    missed: int
    stalled: int
    stalls: int
    error: float
    p50: float
    p99: float
    worst: float
    counts: tuple[int, ...]

    def comparison(self) -> Comparison:
        """In the format of the other benches."""
        return Comparison((self.rate,), (), self.loop, "ticks", notes=asdict(self))


def run(out: Path | str = "bench", seconds: float = 6.0, repeats: int = 7) -> list[Row]:
    """Both loops at every rate for `seconds` each (ours also with real-time priority, if
    permitted), and servo bus reads; print tables and histograms, write `out/loop.json` and
    `out/loop_bus.json`. A minute and a half."""
    rows: list[Row] = []
    for hertz in HERTZ:
        with bridge(hertz) as (control, daemon):
            rows += [
                measured(control, daemon, kind(hertz, seconds)) for kind in (Deadlines, Sleeps)
            ]
            with ahead_of_others() as granted:
                if granted:
                    rows += [
                        measured(control, daemon, kind(hertz, seconds)) for kind in (First, Awake)
                    ]
    show(rows)
    write_json(Path(out), "loop", [row.comparison() for row in rows])
    reads = bus_reads(repeats)
    table(reads, f"{SERVOS} servos, {BAUD // 1000} kbaud and {1e3 * TURNAROUND:.0f} ms turn-around")
    write_json(Path(out), "loop_bus", reads)
    return rows


class Stalling(Policy):
    """A flow policy that regularly computes for `STALL` s without a break."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.flow = build(
            {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 8}, Policy, spec=spec
        )
        self.chunk, self.turn = self.flow.chunk, int(time.monotonic() / EVERY)
        self.node = {"_target_": "benchmarks.loop.Stalling"}

    def initial(self, n: int) -> Tensors:
        return self.flow.initial(n)

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.flow.sample_noise(n, explore)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        now, work = time.monotonic(), torch.zeros(64, 64)
        if int(now / EVERY) > self.turn:
            self.turn = int(now / EVERY)
            while time.monotonic() < now + STALL:
                work = work @ work
        return self.flow.act(obs, carry, noise)


class Deadlines(Rate):
    """The loop of the control process."""

    name = "absolute deadlines"
    spins = False

    def __init__(self, hertz: int, seconds: float) -> None:
        super().__init__(hertz, self.spins)
        self.hertz, self.seconds = hertz, seconds
        self.at = np.zeros(int(hertz * seconds) + 1)
        self.lates = np.zeros_like(self.at)
        self.done: Callable[[], None] = lambda: None

    def wait(self) -> float:
        self.until_next()
        count, now = self.ticks - 1, self.clock()
        if count < len(self.at):
            self.at[count], self.lates[count] = now, self.late
        if now > self.start + self.seconds:
            self.done()
        return now

    def until_next(self) -> None:
        """Wait until the next deadline; `late`: lateness of this iteration in s."""
        super().wait()


class Sleeps(Deadlines):
    """Sleeps for the rest of the period after each iteration."""

    name = "relative sleep"

    def begin(self) -> None:
        super().begin()
        self.woke = self.start

    def until_next(self) -> None:
        meant = self.woke + self.period
        time.sleep(max(0.0, meant - self.clock()))
        self.woke = self.clock()
        self.late = max(0.0, self.woke - meant)
        self.ticks += 1


class First(Deadlines):
    """Absolute deadlines with real-time priority."""

    name = "absolute deadlines, SCHED_FIFO"


class Awake(First):
    """With real-time priority, and busy-waiting before each deadline (`spin`)."""

    name = "absolute deadlines, SCHED_FIFO, spin"
    spins = True


@contextmanager
def bridge(hertz: int) -> Iterator[tuple[ControlLoop, Channels]]:
    """A simulated arm at that rate, moved by a policy in its own process; and the daemon's
    mailboxes."""
    with TemporaryDirectory(dir=memory_folder()) as name:
        folder = Path(name)
        settings = deployment(hertz, folder)
        settings.write(folder)
        daemon = open_channels(settings, folder, Role.DAEMON, create=True)
        open_flight_recorder(settings, folder, create=True)
        control, policy = (
            build_control(settings, folder),
            Child("policy", "embodied.real_robot.policy.decider", folder),
        )
        control.connect()
        policy.start()
        try:
            begin(control, daemon, policy)
            yield control, daemon
        finally:
            policy.stop(2.0)
            control.driver.close()


def deployment(hertz: int, folder: Path) -> Deployment:
    return Deployment(
        driver={"_target_": "embodied.real_robot.drivers.sim.Sim"},
        controller={"_target_": "embodied.embodiments.cartesian_delta.CartesianDelta"},
        kinematics="embodied.embodiments.fr3.forward",
        policy=str(save(folder / "policy" / "0", Stalling(SPEC), 0)),
        allow=("benchmarks",),
        hertz=hertz,
        step=STEP,
        limits=LIMITS,
        fresh=FreshConfig(5.0, 30.0, 30.0),
        force=500.0,
        hand=Hand(high=0.08, speed=0.4, force=35.0, at_stop="hold"),
        heartbeat=Heartbeat(60.0, 120.0),
    )


def begin(control: ControlLoop, daemon: Channels, policy: Child, patience: float = 120.0) -> None:
    """Wait until the policy moves the arm. RuntimeError if it never does."""
    rate, deadline = Rate(50), time.monotonic() + patience
    daemon.beat(time.monotonic())  # as the daemon does
    request = daemon.request
    while control.mode != Mode.RUNNING:
        rate.wait()
        if policy.has_died() or time.monotonic() > deadline:
            raise RuntimeError(policy.died or f"the arm never moved: {control.fault}")
        request.fields["command"] = Command.ARM if control.mode == Mode.IDLE else Command.START
        request.fields["number"] += 1
        request.send()
        control.turn()


def measured(control: ControlLoop, daemon: Channels, rate: Deadlines) -> Row:
    """Iterations at that rate until the time is over."""
    daemon.beat(time.monotonic())  # as the daemon does
    control.quit = False

    def done() -> None:
        control.quit = True

    rate.done = done
    control.run(rate)
    return summary(rate.name, rate.hertz, rate.at[: rate.ticks], rate.lates[: rate.ticks])


def summary(loop: str, hertz: int, at: NDArray[np.float64], lates: NDArray[np.float64]) -> Row:
    """Statistics of iterations at times `at` (s) with lateness `lates` (s)."""
    ticks = min(len(at), len(lates))
    gaps = np.diff(at) * hertz
    lost = np.maximum(np.rint(gaps) - 1, 0).astype(int)
    begins = np.arange(np.ceil(at[0] / EVERY), np.ceil(at[-1] / EVERY)) * EVERY
    over = ((at[:-1, None] < begins + STALL + STEP) & (at[1:, None] > begins)).any(1)
    made = (ticks - 1) / (at[-1] - at[0])
    p50, p99 = np.percentile(lates, [50, 99]) * 1e3
    return Row(
        loop,
        hertz,
        rate=float(made),
        ticks=ticks,
        missed=int(lost.sum()),
        stalled=int(lost[over].sum()),
        stalls=len(begins),
        error=float(abs(made / hertz - 1) * 100),
        p50=float(p50),
        p99=float(p99),
        worst=float(lates.max() * 1e3),
        counts=tuple(int(count) for count in np.histogram(lates, EDGES)[0]),
    )


def bus_reads(repeats: int) -> list[Comparison]:
    """Reading position, speed and current of all servos: one grouped read against one read per
    servo and quantity, and against one per servo."""
    rows: list[Comparison] = []
    for protocol in ("dynamixel", "feetech"):
        faults = Faults(turnaround=TURNAROUND, baud=BAUD)
        with FakeBus(protocol, [2048.0] * SERVOS, faults) as bus:
            joints = tuple(Joint(f"joint{i}", i, 0, 4095) for i in range(1, SERVOS + 1))
            config = BusConfig(protocol, bus.path, joints, timeout=0.5, watchdog=2.5)  # pyright: ignore
            with ServoBus(config) as arm:
                grouped = calls(lambda arm=arm: arm.wire.get(*arm.make.state), 20)
                single = calls(lambda arm=arm: one_by_one(arm, pieces(arm)), 2)
                blocks = calls(lambda arm=arm: one_by_one(arm, (arm.make.state,)), 6)
                for theirs, name, goal in (
                    (single, "a register at a time", 5.0),
                    (blocks, "a servo at a time", None),
                ):
                    label = f"{protocol}: grouped / {name}"
                    rows.append(compare(grouped, theirs, repeats, label, "measurements", goal))
    return rows


def pieces(arm: ServoBus) -> tuple[tuple[int, int], ...]:
    """Address and size of position, speed and current within the block that the driver reads."""
    address, size = arm.make.state
    third = size // 3
    return tuple((address + k * third, third) for k in range(3))


def one_by_one(arm: ServoBus, registers: tuple[tuple[int, int], ...]) -> None:
    for id in arm.ids:
        for address, size in registers:
            arm.wire.ask(address, size, (id,))


def calls(call: Callable[[], Any], count: int) -> Callable[[], int]:
    def block() -> int:
        for _ in range(count):
            call()
        return count

    return block


def show(rows: list[Row], console: Console | None = None) -> None:
    """Print the tables, goals in brackets, and lateness histograms."""
    console = console or Console()
    shown = Table(title=f"servo loop, a policy at 20 Hz beside it that stalls {STALL} s at a time")
    shown.add_column("loop")
    heads = ("Hz", "rate error %", "p50 ms", "p99 ms", "worst ms", "missed", "in stalls")
    for heading in heads:
        shown.add_column(heading, justify="right")
    for row in rows:
        ours = row.loop.startswith(Deadlines.name)
        shown.add_row(
            row.loop,
            str(row.hertz),
            f"{row.error:.3f}{f' ({ERROR})' * ours}",
            f"{row.p50:.3f}",
            f"{row.p99:.2f}{f' ({P99.get(row.hertz)})' * ours}",
            f"{row.worst:.1f}",
            f"{row.missed} of {row.ticks + row.missed}",
            f"{row.stalled} in {row.stalls}{' (0)' * ours}",
        )
    console.print(shown)
    for row in rows:
        console.print(histogram(row))


def histogram(row: Row, width: int = 40) -> str:
    """Print how often each lateness occurred."""
    lines = [f"{row.loop}, {row.hertz} Hz: late by"]
    for low, high, count in zip(EDGES[:-1], EDGES[1:], row.counts, strict=True):
        top = f"{1e3 * high:g}" if high < 1 else "more"
        bar = "#" * round(width * count / max(sum(row.counts), 1))
        lines.append(f"  {1e3 * low:6g} to {top:>4} ms {count:6d} {bar}")
    return "\n".join(lines)


if __name__ == "__main__":
    main(run)
