"""A servo bus that loses bytes, in simulated time: a tick of the control loop takes none here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import pytest

from embodied.real_robot.drivers.servos.bus import PATIENCE
from embodied.real_robot.drivers.servos.codecs import FEETECH
from embodied.real_robot.drivers.servos.driver import ServoBus
from embodied.real_robot.emulators.servos.bus import SILENCE, FakeBus, Faults
from embodied.real_robot.kernel.arm_state import ArmState
from embodied.real_robot.kernel.chain import Chain
from embodied.real_robot.kernel.checks import Enabled, Finite, Fresh, FreshConfig, Torque, Tracking
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.limiter import Limiter
from tests.real_robot.test_servo_bus import BOTH, LIMITS, START, config
from tests.tiers import only_all

PERIOD = 0.02  # s
STATE = 0.1  # s: an arm that was not measured for so long is a fault, as in so101.yaml
SAID = 8  # newest answers of a servo that may still be what is known of it


class ServoLine(FakeBus):
    """Both the bus and, for a `ServoWire`, its port. `now` (s) only moves on with what is waited
    for. `said` are the newest positions that each servo told, whether they arrived or not."""

    path = "the line"
    baud = 1_000_000

    def __init__(
        self, protocol: str, ticks: Sequence[float], faults: Faults | None = None, seed: int = 0
    ) -> None:
        self.now = self.time = 0.0  # of the client; of the bus
        super().__init__(protocol, ticks, faults, seed)
        self.echo = False
        self.said: dict[int, deque[bytes]] = {id: deque(maxlen=SAID) for id in self.servos}
        self._written = 0.0
        self._coming: deque[tuple[float, bytes]] = deque()
        for servo in self.servos.values():
            servo.then = servo.heard = 0.0

    def clock(self) -> float:
        return self.time

    def open(self) -> None: ...

    def close(self) -> None: ...

    def latency(self) -> str:
        return ""

    def write(self, data: bytes) -> None:
        """As the serial port: what was not asked for is dropped."""
        while self._coming and self._coming[0][0] <= self.now:
            self._coming.popleft()
        if self.now - self._written > SILENCE:
            self._buffer.clear()
        self._written = self.now
        self.time = max(self.time, self.now) + 10 * len(data) / self.baud
        self._move()
        self._hear(data)

    def read(self, deadline: float) -> bytes:
        """As the serial port, but that waiting takes no time."""
        if self._coming and self._coming[0][0] < deadline:
            came, data = self._coming.popleft()
            self.now = max(self.now, came)
            return data
        self.now = max(self.now, deadline)
        return b""

    def drain(self, quiet: float, most: float) -> None:
        """As the serial port."""
        end = self.now + most
        while self.read(min(end, self.now + quiet)):
            pass

    def send(self, data: bytes) -> None:
        self._coming.append((self.time, data))

    def _wait(self, seconds: float) -> None:
        self.time += seconds

    def _answer(self, ids: list[int], data: bytes, error: int = 0) -> None:
        for id in ids:
            self.said[id].append(data)
        super()._answer(ids, data, error)


class Site:
    """The driver and the safety chain on such a line, at 50 Hz."""

    def __init__(self, protocol: str, seed: int) -> None:
        self.line = ServoLine(protocol, START, Faults(turnaround=2e-4, baud=1_000_000), seed)
        settings = config(protocol, "", timeout=0.01, watchdog=0.2)
        self.arm = ServoBus(settings, lambda: self.line.now)
        self.arm.wire.port = self.line  # pyright: ignore[reportAttributeAccessIssue]
        self.arm.connect()
        self.begin = self.arm.read()
        fresh = Fresh(FreshConfig(0.25, 0.5, STATE))
        enabled = Enabled()
        stages = [Finite(), fresh, enabled, Torque(LIMITS), Tracking(LIMITS)]
        self.chain = Chain(stages, Limiter(LIMITS, PERIOD))
        self.chain.begin(self.begin)
        enabled.on = True
        self.ticks = 0
        self.due = self.line.now

    def turn(self) -> ArmState:
        """One tick: measure, move to and fro, and send; what was measured. AssertionError for a
        fault, DriverError."""
        now = self.line.now = max(self.line.now, self.due)
        self.due += PERIOD * max(1, math.ceil((now - self.due) / PERIOD + 1e-9))
        self.ticks += 1
        measured = self.arm.read()
        goal = self.begin.q + 0.3 * math.sin(self.ticks / 40)
        sent = self.chain(goal, now, measured, now)
        assert not self.chain.fault, f"tick {self.ticks}: {self.chain.fault}"
        self.arm.write(sent, 0.05)
        return measured

    def made_up(self) -> list[int]:
        """Servos that are known to be where they never said that they are."""
        motion, known = self.arm.make.motion, self.arm._motion
        return [
            id
            for id, said in self.line.said.items()
            if known[id] not in [motion(data) for data in said if len(data) > 1]
        ]


@BOTH
@pytest.mark.parametrize(
    ("drop", "seconds", "seed"),
    [(0.005, 20, 0), *(pytest.param(0.002, 600, seed, marks=only_all) for seed in (1, 2))],
)
def test_lost_bytes_are_no_fault_and_a_silent_bus_is(
    protocol: str, drop: float, seconds: int, seed: int
) -> None:
    """Before, one servo of 0.2% lost bytes was given up every 100 s: four requests in one tick."""
    site = Site(protocol, seed)
    site.line.faults.drop = drop
    while site.line.now < seconds:
        site.turn()
        assert not site.made_up()
    assert site.arm.wire.repeated > 0.02 * site.ticks
    site.line.faults.drop = 0.0
    site.turn()
    began = site.line.now
    site.line.gone |= set(site.line.servos)
    with pytest.raises(DriverError, match=r"no answer from joint shoulder .*asked \d+ times"):
        for _ in range(PATIENCE):
            site.turn()
    assert site.line.now - began < STATE + PERIOD


@BOTH
@pytest.mark.parametrize(("id", "name"), [(1, "joint shoulder"), (4, "the hand")])
def test_a_lost_answer_ages_the_measurement(protocol: str, id: int, name: str) -> None:
    """The hand is no part of it; both are a fault where they stay silent."""
    site = Site(protocol, 0)
    for _ in range(2):
        site.turn()
        before = site.line.now
        site.line.gone.add(id)
        for _ in range(PATIENCE - 1):
            measured = site.turn()
            assert (measured.t < before) == (id == 1)
        site.line.gone.clear()
        assert site.turn().t > before
    site.line.gone.add(id)
    with pytest.raises(DriverError, match=f"no answer from {name}"):
        for _ in range(PATIENCE):
            site.turn()


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_frame_that_ends_with_a_part_of_the_next_is_none(cut: int) -> None:
    """Feetech's one byte of checksum fits one such frame in 256; `cut`: bytes of the next frame
    that come together with it."""
    site = Site("feetech", 0)
    wire, line = site.arm.wire, site.line
    second = FEETECH.answer(2, 0, bytes(15))

    def short(value: int) -> bytes:
        """The answer of servo 1 without its last byte of data."""
        frame = FEETECH.answer(1, 0, bytes((*range(14), value)))
        return frame[:-2] + frame[-1:]

    shorts = (short(value) for value in range(256))
    first = next(each for each in shorts if FEETECH.opened(each + second[:1]) is not None)
    line._answer = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    for part in (first + second[:cut], second[cut:]):
        line.send(part)
    line._coming = deque((line.now + 1e-3, data) for _, data in line._coming)
    wire.retries = 0
    wire.port.write = lambda data: None
    assert not wire.ask(56, 15, (1, 2)), "the next one is spoilt, too"
