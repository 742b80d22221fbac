"""Random chunk records through the control loop: `python -m tests.real_robot.chunk_fuzz 100000`.

The loop and its chain are real, the clock is the test's, and the simulated arm stands where it was
sent, because its physics would take most of the time. Every record that is
malformed by an oracle of this file's own has to be refused in one line, none may raise or count as
an internal error, and nothing that is sent may leave the limits.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from embodied.real_robot.drivers.sim import Sim
from embodied.real_robot.ipc.channels import CHUNK, MOST_CAMERAS
from embodied.real_robot.kernel.mailbox import memory_folder
from embodied.real_robot.kernel.messages import Command, Mode
from tests.real_robot.test_control import DOWN, STEP, Bench, within

FIELDS = CHUNK.names or ()
STATE = 0.1  # s: of the bench's freshness
FOLLOWS = (Mode.ARMED, Mode.RUNNING)
INTEGERS = (
    *(-(2**31), -65, -1, 0, 1, 3, 4, 5, 32, 33, 63, 64, 65, 127, 128, 129, 4096, 4097, 10**6),
    2**31 - 1,
)
NUMBERS = (math.nan, math.inf, -math.inf, 1.79e308, -1.79e308, 5e-324, -0.0, 0.0, 1e9, -1e9, 1e-9)


def malformed(record: np.void, now: float) -> bool:
    """What a chunk for four actions must not be (the oracle)."""
    seen, start = float(record["seen"]), float(record["start"])
    whole = all(math.isfinite(t) for t in (seen, start, *record["image_times"].tolist()))
    counts = (
        1 <= record["steps"] <= 128 and record["size"] == 4 and 0 <= record["noise_size"] <= 4096
    )
    return not (whole and counts and seen <= now + STATE and start <= now + STATE + STEP)


@dataclass
class Fuzz:
    """`one` record after the other; `told` counts what became of them, `lines` the faults."""

    bench: Bench
    random: np.random.Generator
    told: Counter[str] = field(default_factory=Counter[str])
    lines: Counter[str] = field(default_factory=Counter[str])

    def one(self) -> None:
        """A record, in a mode that the arm is brought to first."""
        bench, mode = self.bench, self._mode()
        record, follows = self._record(), mode in FOLLOWS
        bad = malformed(record, bench.now + 0.01)
        bench.there.chunk.fields[0] = record
        bench.there.chunk.send()
        bench.run(1)
        fault = bench.fault
        assert not bench.control.internal_error, fault
        assert "internal error" not in fault and "\n" not in fault
        if bad and follows:
            assert bench.mode == Mode.ESTOP, (mode, record)
            assert fault.startswith("the policy's "), fault
            self.lines[" ".join(fault.split()[:4])] += 1
        elif bad:
            assert bench.mode == mode and not (fault and mode == Mode.IDLE), fault
        elif follows:
            bench.run(int(self.random.integers(0, 8)) if self.random.random() < 0.5 else 0)
            assert not bench.control.internal_error, bench.fault
        followed = "followed" if bench.mode == mode else "held or latched by the chain"
        self.told[("latched" if bad else followed) if follows else "dropped"] += 1

    def finish(self) -> None:
        """What was sent until now kept the limits."""
        within(self.bench.sent)
        del self.bench.sent[:-4]

    def _mode(self) -> Mode:
        """The mode that the arm was brought to: mostly it moves, now and then something else."""
        bench, which = self.bench, self.random.random()
        if which < 0.1:
            bench.run(1)
            return bench.mode
        for _ in range(400):  # actions that are not finite are followed until the chain refuses
            mode = bench.mode
            if mode == Mode.RUNNING or (which < 0.2 and mode == Mode.ARMED):
                return mode
            if mode == Mode.ESTOP:
                bench.ask(Command.RESET)
                continue
            if which < 0.15:
                return mode
            bench.there.chunk.fields[0] = self._good()
            bench.there.chunk.send()
            bench.ask(Command.ARM if mode == Mode.IDLE else Command.START)
        raise AssertionError(f"it does not start: {bench.mode.name}, {bench.fault}")

    def _good(self) -> np.void:
        """A chunk that moves the arm a little, up and down."""
        bench, record = self.bench, np.zeros(1, CHUNK)[0]
        record["number"] = self.random.integers(-5, 10**6)
        record["seen"] = bench.there.state.fields["measured"][0]
        record["start"], record["steps"], record["size"] = bench.now, 8, 4
        moves = self.random.uniform(-1, 1, (8, 4)) * (self.random.random() < 0.3)
        record["actions"][:8, :4] = moves + DOWN * [0, 0, 0, 1]
        return record

    def _record(self) -> np.void:
        kind, record = self.random.random(), self._good()
        if kind < 0.2:
            return np.frombuffer(bytearray(self.random.bytes(CHUNK.itemsize)), CHUNK)[0]
        for _ in range(self.random.integers(1, 4) if kind < 0.8 else 0):
            name = str(self.random.choice(FIELDS))
            if name in ("steps", "size", "noise_size", "number"):
                record[name] = self._integer()
            elif name in ("seen", "start"):
                record[name] = self._number()
            elif name == "image_times":
                record[name][self.random.integers(MOST_CAMERAS)] = self._number()
            else:
                with np.errstate(over="ignore"):
                    values = record[name].reshape(-1)
                    values[self.random.integers(0, 4)] = np.float32(self._number())
        return record

    def _integer(self) -> int:
        if self.random.random() < 0.8:
            return int(self.random.choice(INTEGERS))
        return int(self.random.integers(-(2**31), 2**31))

    def _number(self) -> float:
        kind = self.random.random()
        if kind < 0.4:
            return float(self.random.choice(NUMBERS))
        if kind < 0.6:
            return float(np.frombuffer(self.random.bytes(8), np.float64)[0])
        far = 10 ** self.random.uniform(-9, 9)
        return self.bench.now + float(self.random.choice([-far, far]))


def without_physics(driver: Sim) -> None:
    """An arm that is where it was sent."""

    def run() -> float:
        driver.data.qpos[driver.at] = driver.data.ctrl[driver.servos]
        return driver.clock()

    driver._run = run  # pyright: ignore[reportPrivateUsage]


def fuzz(count: int, seed: int = 0) -> Fuzz:
    """That many records; AssertionError where one is not treated as it should be."""
    with TemporaryDirectory(dir=memory_folder()) as folder:
        made = Fuzz(Bench(Path(folder)), np.random.default_rng(seed))
        without_physics(made.bench.driver)
        made.bench.run(2)
        for number in range(1, count + 1):
            made.one()
            if number % 500 == 0 or number == count:
                made.finish()
    return made


if __name__ == "__main__":
    found = fuzz(*(int(word) for word in sys.argv[1:]))
    print(dict(found.told))
    for line, times in found.lines.most_common():
        print(f"{times:8d}  {line} ...")
