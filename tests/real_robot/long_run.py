"""A long run of the safety chain: `python -m tests.real_robot.long_run [SEQUENCES] [SEED]`.

Each sequence is a few ticks of one adversary's commands, on an arm that springs hold and that goes
on from where the sequence before left it, moving; an operator clears what was latched. Every output
is held against the limits of position, velocity, acceleration and jerk, and every torque above its
limit has to end in a latched stop. 10^6 sequences by default; tests run fewer.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from real_robot.control.arm_state import ArmState, Floats
from real_robot.safety.chain import Chain
from real_robot.safety.checks import Enabled, Finite, Fresh, FreshConfig, Torque, Tracking
from real_robot.safety.energy_tank import Config as EnergyConfig
from real_robot.safety.energy_tank import Energy
from real_robot.safety.limits import Limiter
from tests.real_robot.test_chain import DT, LIMITS, START, within

MOST = 10  # ticks of a sequence
BLOCK = 20_000  # ticks that are looked at together
STIFFNESS, DAMPING, MASS, PATIENCE = 60.0, 8.0, 0.2, 3
WORST = (np.nan, np.inf, -np.inf, 1e308, -1e308, 5e-324, 0.0)
LOW, HIGH = np.asarray(LIMITS.low), np.asarray(LIMITS.high)
TANK = {"start": 2.0, "most": 3.0, "least": 0.1, "power": 50.0}


@dataclass
class Told:
    """To the chain in one tick: `q` and when what it comes from was `seen` (s ago)."""

    q: Floats
    seen: float = 0.0


Adversary = Callable[[np.random.Generator, Floats, int], Told]


def jumps(random: np.random.Generator, sent: Floats, k: int) -> Told:
    return Told(random.uniform(5 * LOW - 4, 5 * HIGH + 4))


def bangs(random: np.random.Generator, sent: Floats, k: int) -> Told:
    return Told(HIGH + 9 if random.random() < 0.5 else LOW - 9)


def trembles(random: np.random.Generator, sent: Floats, k: int) -> Told:
    return Told(sent + random.normal(0, 10.0 ** random.uniform(-9, 0), 2))


def turns_late(random: np.random.Generator, sent: Floats, k: int) -> Told:
    """At full speed to a limit, and away at the last moment."""
    return Told(np.where(sent < HIGH - random.uniform(0.1, 0.3, 2), HIGH + 9, LOW - 9))


def is_no_number(random: np.random.Generator, sent: Floats, k: int) -> Told:
    q = jumps(random, sent, k).q
    q[random.integers(2)] = random.choice(WORST)
    return Told(q)


def has_no_shape(random: np.random.Generator, sent: Floats, k: int) -> Told:
    return Told(np.zeros(int(random.integers(0, 5))) if k == 0 else sent)


def is_late(random: np.random.Generator, sent: Floats, k: int) -> Told:
    """From an old observation, or from one that has yet to be made."""
    return Told(jumps(random, sent, k).q, float(random.choice([0.05, 0.2, 9.0, -0.01, -9.0])))


MOVE: tuple[Adversary, ...] = (jumps, bangs, trembles, turns_late)
LIE: tuple[Adversary, ...] = (is_no_number, has_no_shape, is_late)
LIES = 0.1  # share of sequences


class World:
    """Two joints that springs hold (semi-implicit Euler), now and then pushed; a chain before
    them."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        config = EnergyConfig(**TANK, stiffness=(STIFFNESS,) * 2, damping=(DAMPING,) * 2)
        self.enabled, self.energy = Enabled(), Energy(config, LIMITS, DT)
        fresh = Fresh(FreshConfig(hold=0.1, stop=0.3, state=0.05))
        stages = [Finite(), fresh, self.enabled, self.energy, Torque(LIMITS, PATIENCE)]
        self.chain = Chain([*stages, Tracking(LIMITS)], Limiter(LIMITS, DT))
        self.q, self.dq, self.tau = START.copy(), np.zeros(2), np.zeros(2)
        self.now, self.above = 0.0, 0
        self.faults: Counter[str] = Counter()
        self.begin(START)

    def begin(self, q: Floats) -> None:
        """An operator's reset."""
        self.chain.clear()
        self.chain.begin(ArmState(q.copy(), np.zeros(2), np.zeros(2), self.now))
        self.enabled.on, self.above = True, 0

    def tick(self, told: Told, push: Floats) -> Floats:
        """What was sent [2]."""
        self.now += DT
        arm = ArmState(self.q.copy(), self.dq.copy(), self.tau.copy(), self.now)
        self.above = self.above + 1 if (np.abs(self.tau) > LIMITS.torque).any() else 0
        sent = self.chain(told.q, self.now - told.seen, arm, self.now)
        assert self.chain.fault or self.above < PATIENCE, "a torque above its limit went on"
        self.tau = STIFFNESS * (sent - self.q) - DAMPING * self.dq
        self.dq = self.dq + (self.tau + push) / MASS * DT
        self.q = self.q + self.dq * DT
        return sent

    def sequence(self, sent: list[Floats]) -> None:
        """Of one adversary; what was sent is added to `sent`."""
        random = self.random
        kind = LIE if random.random() < LIES else MOVE
        adversary = kind[random.integers(len(kind))]
        push = random.normal(0, 30.0, 2) if random.random() < 0.02 else np.zeros(2)
        for k in range(int(random.integers(1, MOST))):
            sent.append(self.tick(adversary(random, self.chain.limiter.q, k), push).copy())
            if self.chain.fault:
                break
        if self.chain.fault:
            self.recover(sent)

    def recover(self, sent: list[Floats]) -> None:
        """Whatever is asked, it brakes, rests, and stays there; then somebody resets it."""
        self.faults[self.chain.fault.split(" is ")[0].split(" measures ")[0][:40]] += 1
        for k in range(400):
            sent.append(self.tick(jumps(self.random, self.chain.limiter.q, k), np.zeros(2)).copy())
            calm = bool((np.abs(self.dq) < 1e-2).all())
            if self.chain.resting and calm:
                break
        assert self.chain.resting and self.chain.fault, "it did not come to rest"
        self.begin(self.chain.limiter.q.copy())


def run(sequences: int, seed: int = 0, say: Callable[[str], None] | None = None) -> World:
    """AssertionError as soon as one output is outside of a limit. The world, for its counts."""
    world, sent, began = World(seed), [START.copy()], time.monotonic()
    for number in range(1, sequences + 1):
        world.sequence(sent)
        if len(sent) > BLOCK or number == sequences:
            within(np.stack(sent))
            sent = sent[-4:]  # derivatives across the seam are looked at as well
            if say is not None:
                ticks, passed = round(world.now / DT), time.monotonic() - began
                say(f"{number} sequences, {ticks} ticks, {passed:.0f} s: all within the limits")
    return world


if __name__ == "__main__":
    asked = [int(word) for word in sys.argv[1:]]
    made = run(asked[0] if asked else 1_000_000, asked[1] if len(asked) > 1 else 0, print)
    print(dict(made.faults))
