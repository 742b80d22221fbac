"""The energy tank: bookkeeping by hand, and the stiffness that diverges without it."""

from __future__ import annotations

import numpy as np
import pytest

from embodied.core.build import ConfigError
from real_robot.control.arm_state import ArmState, Limits
from real_robot.safety.chain import Chain
from real_robot.safety.energy_tank import (
    Config,
    Energy,
    Impedance,
    ImpedanceConfig,
    Tank,
    TankConfig,
    affordable,
)
from real_robot.safety.limits import Limiter

TANK = {"start": 2.0, "most": 3.0, "least": 0.1, "power": 1000.0}


def test_what_is_spent_and_dissipated_is_booked() -> None:
    tank = Tank(TankConfig(**TANK, share=0.5))
    tank.book(spent=0.5, dissipated=0.2)
    assert tank.level == pytest.approx(2.0 - 0.5 + 0.1)
    tank.book(spent=-9.0, dissipated=0.0)
    assert tank.level == 3.0, "never more than it holds"
    assert tank.budget(1.0) == pytest.approx(2.9)
    assert tank.budget(0.001) == pytest.approx(1.0), "the power is bounded too"


@pytest.mark.parametrize(
    ("linear", "square", "budget", "share"),
    [(1.0, 0.0, 0.5, 0.5), (1.0, 2.0, 9.0, 1.0), (1.0, 2.0, 1.0, 0.5), (-1.0, 3.0, 0.0, 1 / 3)],
)
def test_the_largest_affordable_share(
    linear: float, square: float, budget: float, share: float
) -> None:
    assert affordable(linear, square, budget) == pytest.approx(share)


def test_a_tick_of_variable_stiffness_by_hand() -> None:
    """50 N/m that should become 150, 0.1 m away and coming back at 0.5 m/s: the 100 more would do
    5 W for 10 ms, 0.05 J, of which 2 W allow 0.02: two fifths of it, 40 N/m."""
    config = ImpedanceConfig(**{**TANK, "power": 2.0}, constant=(50.0,))
    spring, v, dt = Impedance(config, np.zeros(1)), np.array([-0.5]), 0.01
    force = spring(np.array([0.1]), v, np.zeros(1), np.array([150.0]), dt)
    assert spring.share == pytest.approx(0.4) and force[0] == pytest.approx(-5.0 - 4.0)
    # It really came 4 mm closer under those 4 N (0.016 J), and 3 N s/m took 0.0075 J away.
    spring.settle(np.array([-0.004]), np.array([3.0]), v, dt)
    assert spring.tank.level == pytest.approx(2.0 - 0.016 + 0.0075)


def oscillate(filtered: bool, damping: float = 0.0, wall: float = 0.0) -> tuple[list[float], float]:
    """Total energy of a mass of 2 kg on a spring of 50 N/m that gets 600 more whenever the mass is
    on its way back, in 3 s of 1 ms, the tank counted where there is one; and its least level.
    `wall`: N/m of an elastic one, 2 cm away."""
    mass, constant, dt = 2.0, np.array([50.0]), 1e-3
    tank = {**TANK, "power": 1e9}
    spring = Impedance(ImpedanceConfig(**tank, constant=(50.0,)), np.zeros(1))
    x, v, totals, least = np.array([0.05]), np.zeros(1), [], np.inf
    for _ in range(3000):
        returning = float(v @ x) < 0
        stiffness = constant + (600.0 if returning else 0.0)
        passive = spring(x, v, np.zeros(1), stiffness, dt)
        force = passive if filtered else -stiffness * x
        before = x.copy()
        deep = np.maximum(-0.02 - x, 0.0)
        v = v + (force + wall * deep - damping * v) / mass * dt
        x = x + v * dt
        spring.settle(x - before, np.array([damping]), v, dt)
        stored = 0.5 * mass * float(v @ v) + 0.5 * float(constant @ (x * x))
        deep = np.maximum(-0.02 - x, 0.0)
        stored += 0.5 * wall * float(deep @ deep)
        totals.append(stored + (spring.tank.level if filtered else 0.0))
        least = min(least, spring.tank.level)
    return totals, least


@pytest.mark.parametrize("wall", [0.0, 3000.0])
def test_without_a_tank_the_adversary_pumps_the_mass_up(wall: float) -> None:
    totals, _ = oscillate(filtered=False, wall=wall)
    assert totals[-1] > 1e4 * totals[0]


@pytest.mark.parametrize("wall", [0.0, 3000.0])
@pytest.mark.parametrize("damping", [0.0, 5.0])
def test_with_a_tank_the_energy_stays_bounded(damping: float, wall: float) -> None:
    totals, least = oscillate(filtered=True, damping=damping, wall=wall)
    assert max(totals) <= totals[0] * 1.01
    assert least >= 0.5 * TANK["least"], "the margin covers what one tick may overdraw"


def excess(random: np.random.Generator, filtered: bool) -> tuple[float, float]:
    """The most by which energy and tank together rose above what was there and what a person's
    hand put in, J, in 0.5 s of 0.5 ms of random stiffness, set-points and pushes; the tank's least.
    """
    mass, constant, dt = 2.0, np.array([50.0, 80.0]), 5e-4
    spring = Impedance(
        ImpedanceConfig(**{**TANK, "power": 20.0}, constant=(50.0, 80.0)), 0 * constant
    )
    x, v, place = random.uniform(-0.1, 0.1, 2), random.normal(0, 0.3, 2), np.zeros(2)
    damping, push = random.uniform(0, 20, 2), np.zeros(2)
    wanted, more, given, first, most, least = np.zeros(2), np.zeros(2), 0.0, None, -np.inf, np.inf
    for k in range(1000):
        if k % 50 == 0:
            wanted, push = random.uniform(-0.5, 0.5, 2), random.normal(0, 5, 2)
            more = random.uniform(0, 600, 2)
        returning = v * (spring.place - x) > 0  # stiffer on the way back: this is what pumps
        stiffness = constant + np.where(returning, more, 0.0)
        force = spring(x, v, wanted, stiffness, dt)
        place = spring.place if filtered else place + wanted * dt
        force = force if filtered else stiffness * (place - x)
        before = x
        v = v + (force + push - damping * v) / mass * dt
        x = x + v * dt
        spring.settle(x - before, damping, v, dt)
        given += float(push @ (x - before))
        e = place - x
        stored = 0.5 * mass * float(v @ v) + 0.5 * float(constant @ (e * e))
        total = stored + (spring.tank.level if filtered else 0.0) - given
        first = total if first is None else first
        most, least = max(most, total - first), min(least, spring.tank.level)
    return most, least


def test_whatever_stiffness_and_set_points_are_asked_for_it_stays_passive() -> None:
    random = np.random.default_rng(0)
    rose = [excess(random, filtered=True) for _ in range(25)]
    assert max(most for most, _ in rose) < 0.005, "J, of the integration"
    assert min(least for _, least in rose) > 0.5 * TANK["least"]
    assert max(excess(random, filtered=False)[0] for _ in range(10)) > 1.0


def test_a_moving_set_point_is_paid_for_and_then_stops() -> None:
    """A joint held by 100 N m/rad against a wall: pushing the set-point by s costs 50 s^2 J."""
    limits = Limits((-3.0,), (3.0,), (0.0,), (1.0,), (10.0,), (500.0,), (1e3,), (9.0,))
    config = Config(**{**TANK, "power": 1e9}, stiffness=(100.0,), damping=(0.0,))
    stage = Energy(config, limits, 0.01)
    chain = Chain([stage], Limiter(limits, 0.01))
    wall = ArmState(np.zeros(1), np.zeros(1), np.zeros(1), 0.0)
    chain.begin(wall)
    sent = [float(chain(np.array([1.0]), 0.0, wall, 0.0)[0]) for _ in range(600)]
    # 1.9 J until the tank is at its least: 50 s^2 = 1.9.
    assert max(sent) == pytest.approx((1.9 / 50) ** 0.5, abs=0.03)
    assert stage.tank.level == pytest.approx(0.1, abs=0.25) and chain.counts[0] > 0
    free = Energy(Config(**TANK, stiffness=(100.0,), damping=(0.0,)), limits, 0.01)
    chain = Chain([free], Limiter(limits, 0.01))
    chain.begin(wall)
    q = np.zeros(1)
    for _ in range(400):  # an arm that follows at once costs next to nothing
        q = chain(np.array([1.0]), 0.0, ArmState(q, np.zeros(1), np.zeros(1), 0.0), 0.0).copy()
    assert q[0] == pytest.approx(1.0, abs=1e-3)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="least <= start"):
        TankConfig(**{**TANK, "start": 0.01})
    limits = Limits((-3.0,), (3.0,), (0.0,), (1.0,), (10.0,), (500.0,), (1e3,), (9.0,))
    with pytest.raises(ConfigError, match="needs 1 stiffnesses"):
        Energy(Config(**TANK, stiffness=(1.0, 2.0), damping=(0.0,)), limits, 0.01)
