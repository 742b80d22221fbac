"""The energy tank under noise and delay: what springs and tank hold together never grows by more
than what is pushed in from outside. 10^4 rollouts for each case, many at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from embodied.real_robot.control.arm_state import ArmState, Floats, Limits
from embodied.real_robot.safety.chain import Chain
from embodied.real_robot.safety.energy_stage import Config, Energy
from embodied.real_robot.safety.energy_tank import Held, TankConfig
from embodied.real_robot.safety.limits import Limiter
from tests.real_robot.filtered_springs import FilteredSprings
from tests.real_robot.two_link import TwoLink

TANK: dict[str, Any] = {"start": 2.0, "most": 3.0, "least": 0.1, "power": 1000.0}
STIFFNESS, DAMPING = np.array([200.0, 100.0]), np.array([14.0, 8.0])
TOOL, DAMPED = np.array([500.0, 300.0]), np.array([45.0, 35.0])
LIMITS = Limits(
    (-3.0,) * 2, (3.0,) * 2, (0.0,) * 2, (3.0,) * 2, (20.0,) * 2, (1e3,) * 2, (1e3,) * 2, (9.0,) * 2
)


class Measured:
    """What is known of positions [..., m]: off by `noise`, and up to `delay` s old."""

    def __init__(self, random: np.random.Generator, noise: float, delay: float, dt: float) -> None:
        self.random, self.noise = random, noise
        self.most = int(np.floor(delay / dt + 1e-9))
        self.past: list[Floats] = []

    def __call__(self, x: Floats) -> Floats:
        """The newest measurement; one that has been seen is not followed by an older one."""
        if not self.past:
            self.age = np.zeros(x.shape[:-1], int)
        self.past = [x.copy(), *self.past[: self.most]]
        drawn = self.random.integers(0, self.most + 1, x.shape[:-1])
        self.age = np.minimum(np.minimum(drawn, self.age + 1), len(self.past) - 1)
        then = np.take_along_axis(np.stack(self.past), self.age[None, ..., None], 0)[0]
        return then + self.random.normal(0, self.noise, x.shape)


def chained(seed: int, noise: float, delay: float, seconds: float = 2.0) -> tuple[float, float]:
    """The most that energy and tank of an arm behind the safety chain rose by, J, with set-points
    that jump, pushes, and velocities measured with a noise of 0.1 rad/s; the tank's least."""
    random, dt = np.random.default_rng(seed), 0.01
    config = Config(
        **TANK,
        stiffness=tuple(STIFFNESS),
        damping=tuple(DAMPING),
        noise=noise,
        delay=delay,
        speed=4.0,
    )
    stage = Energy(config, LIMITS, dt)
    chain, measured = Chain([stage], Limiter(LIMITS, dt)), Measured(random, noise, delay, dt)
    arm = TwoLink(random.uniform(-1, 1, 2), np.zeros(2), STIFFNESS, DAMPING)
    chain.begin(ArmState(arm.q, arm.dq, np.zeros(2), 0.0))
    first, most, least = arm.energy() + stage.tank.level, -np.inf, np.inf
    for k in range(round(seconds / dt)):
        if k % 20 == 0:
            target, push = random.uniform(-2, 2, 2), random.normal(0, 5, 2)
        state = ArmState(measured(arm.q), arm.dq + random.normal(0, 0.1, 2), np.zeros(2), k * dt)
        sent = chain(target, k * dt, state, k * dt).copy()
        # What was sent before is in the books now, what is sent now is not yet.
        most = max(most, float(arm.energy() + stage.tank.level - first - arm.given))
        least = min(least, float(stage.tank.level))
        arm.setpoint = sent
        arm.run(dt, push, 1e-3)
    return most, least


@pytest.mark.parametrize(("noise", "delay"), [(0.0, 0.0), (1e-3, 0.0), (0.0, 0.035), (1e-3, 0.035)])
def test_a_coupled_arm_behind_the_chain(noise: float, delay: float) -> None:
    for seed in range(4):
        rose, _ = chained(seed, noise, delay)
        assert rose < 0.01 * TANK["start"]


@dataclass(frozen=True)
class Case:
    """`late`: the springs know the position as late as the tank does, and are held over the tick;
    otherwise they are the robot's own, and only the tank knows it late."""

    noise: float
    delay: float
    dt: float = 0.01
    on_tool: bool = False
    late: bool = False
    filtered: bool = True
    speed: float = 6.0
    seconds: float = 0.4

    def held(self) -> Held:
        stiffness, damping = (TOOL, DAMPED) if self.on_tool else (STIFFNESS, DAMPING)
        return Held(stiffness, damping, np.full(2, np.inf))

    def config(self) -> TankConfig:
        late = self.delay + self.dt if self.late else 0.0
        return TankConfig(**TANK, noise=self.noise, delay=self.delay, speed=self.speed, late=late)


def rollouts(case: Case, count: int, seed: int = 0) -> Floats:
    """[3, count]: what energy and tank rose by at most, J, when set-points and stiffness are
    commanded that pump (a set-point ahead of the motion, stiffer on the way back) and hands push;
    the tank's least; the mean share of what was wanted that was done."""
    random, batch, dt = np.random.default_rng(seed), (count, 2), case.dt
    held, ticks = case.held(), round(case.seconds / dt)
    start = random.uniform([-1, 0.5], [1, 2.5], batch)
    stiff = np.broadcast_to(held.stiffness, batch)
    arm = TwoLink(start, random.normal(0, 0.5, batch), stiff, held.damping, case.on_tool)
    measured, place = Measured(random, case.noise, case.delay, dt), arm.place
    springs, scale = FilteredSprings(case.config(), held, place, dt), 0.2 if case.on_tool else 0.5
    books = np.stack([np.full(count, -np.inf), np.full(count, np.inf), np.zeros(count)])
    first, before = arm.energy() + TANK["start"], arm.place
    for k in range(ticks):
        if k % round(0.1 / dt) == 0:
            push, ahead = random.normal(0, 5, batch), scale * random.uniform(-0.5, 1, batch)
            high = random.uniform(0.3, 1.0, batch) * held.stiffness
        seen, last = measured(arm.place), arm.place
        moving, before = np.sign(last - before), last
        wanted = seen + ahead * moving
        stiff = np.where((place - seen) * moving > 0, high, 0.2 * high)
        books[2] += springs(seen, k * dt, wanted, stiff) / ticks
        if case.filtered:
            place, stiff = springs.place.copy(), springs.stiffness.copy()
        else:
            place = wanted
        arm.setpoint, arm.stiffness = place, stiff
        arm.damping = held.damping * np.sqrt(stiff / held.stiffness)
        arm.felt = seen if case.late else None
        total = arm.energy() + springs.tank.level * case.filtered - first - arm.given
        np.maximum(books[0], total, out=books[0])
        np.minimum(books[1], springs.tank.level, out=books[1])
        arm.run(dt, push)
    return books


CASES = {
    "exact": Case(0.0, 0.0),
    "noise": Case(1e-3, 0.0),  # 0.14 rad/s where velocities are differences over a tick
    "noise, 5 ms": Case(1e-3, 0.005),
    "noise, 35 ms": Case(1e-3, 0.035),
    "tool, noise, 2 ms": Case(4e-5, 0.002, 1e-3, on_tool=True, seconds=0.15),  # 0.05 m/s
    "tool, noise, 5 ms": Case(4e-5, 0.005, 1e-3, on_tool=True, seconds=0.15),
    "tool, noise, 35 ms": Case(5e-4, 0.035, on_tool=True),
    "late springs, 5 ms": Case(1e-3, 0.005, 5e-3, late=True),
    "late springs on the tool, 5 ms": Case(
        4e-5, 0.005, 1e-3, on_tool=True, late=True, seconds=0.15
    ),
    "late springs on the tool, 35 ms": Case(5e-4, 0.035, on_tool=True, late=True),
}


@pytest.mark.parametrize("name", CASES)
def test_ten_thousand_arms(name: str) -> None:
    for seed in range(10):
        rose, least, _ = rollouts(CASES[name], 1000, seed=seed)
        assert rose.max() < 0.01 * TANK["start"]
        assert least.min() > 0.99 * TANK["least"], "what it cannot pay for, it does not do"


def test_without_the_tank_they_would_be_pumped_up() -> None:
    for name in ("exact", "tool, noise, 35 ms", "late springs, 5 ms"):
        rose = rollouts(replace(CASES[name], filtered=False), 200)[0]
        assert np.median(rose) > TANK["start"]
