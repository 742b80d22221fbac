"""The energy tank: bookkeeping by hand, and the stiffness that diverges without it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embodied.core.build import ConfigError
from embodied.embodiments import fr3
from embodied.real_robot.control.arm_state import ArmState, Floats, Limits
from embodied.real_robot.safety.chain import Chain, Tick
from embodied.real_robot.safety.energy_stage import Config, Energy, tool_error
from embodied.real_robot.safety.energy_tank import Held, Tank, TankConfig
from embodied.real_robot.safety.limits import Limiter
from tests.real_robot.filtered_springs import FilteredSprings

TANK: dict[str, Any] = {"start": 2.0, "most": 3.0, "least": 0.1, "power": 1000.0}
ONE = Limits((-3.0,), (3.0,), (0.0,), (1.0,), (10.0,), (500.0,), (1e3,), (9.0,))


def springs(stiffness: float, damping: float = 0.0, stretch: float = np.inf) -> Held:
    return Held(np.array([stiffness]), np.array([damping]), np.array([stretch]))


def tank(held: Held, dt: float = 0.01, **more: Any) -> Tank:
    made = Tank(TankConfig(**{**TANK, **more}), held, dt)
    made.begin(np.zeros(1), held.stiffness, 0.0)
    return made


def test_a_step_is_booked_at_the_position_that_was_measured_then() -> None:
    """100 N/m stretched from 0.1 to 0.2 m: 50 (0.2^2 - 0.1^2) J; and back again with the arm 0.05
    m nearer: 50 (0.05^2 - 0.15^2) J."""
    books = tank(springs(100.0))
    books.command(np.array([0.1]))
    books.measure(np.zeros(1), 0.01)
    books.command(np.array([0.2]))
    books.measure(np.array([0.05]), 0.02)
    assert books.level == pytest.approx(2.0 - 50 * 0.2**2)
    books.command(np.array([0.1]))
    books.measure(np.array([0.05]), 0.03)
    assert books.level == pytest.approx(2.0 - 50 * (0.2**2 + 0.05**2 - 0.15**2))
    assert books.budget(1.0) == pytest.approx(books.level - 0.1)
    assert books.budget(1e-4) == pytest.approx(0.1), "the power is bounded too"


def test_two_commands_before_a_measurement_are_both_booked() -> None:
    books = tank(springs(100.0))
    books.command(np.array([0.1]))
    books.command(np.array([0.1]), np.array([200.0]))
    books.command(np.array([0.15]))
    books.measure(np.zeros(1), 0.01)
    assert books.level == pytest.approx(2.0 - 100 * 0.15**2)


def test_what_dampers_took_is_booked_as_what_a_steady_motion_loses() -> None:
    """5 mm, then 5 mm more, in two windows of 50 ms, against 20 N s/m: 2 x 20 x 0.1^2 x 0.05 J."""
    books = tank(springs(100.0, 20.0), share=0.5)
    for k in range(1, 11):
        books.measure(np.array([1e-3 * k]), 0.01 * k)
    assert books.level == pytest.approx(2.0 + 0.5 * 2 * 20 * 0.1**2 * 0.05)
    for k in range(1000):
        books.measure(np.array([0.5 * (k % 2)]), 0.1 + 0.06 * k)
    assert books.level == 3.0, "never more than it holds"


def test_what_is_not_certain_is_booked_to_the_tanks_disadvantage() -> None:
    """A step of 0.1 m at 100 N/m while the arm comes 0.02 m nearer a tick, measured 20 ms late:
    it may have been made before the arm came nearer, or after; nobody knows yet, so 0.5 m/s for
    those 20 ms are taken off as well."""
    late = tank(springs(100.0), delay=0.02, speed=0.5)
    late.command(np.array([0.1]))
    assert late.level == pytest.approx(2.0 - (50 * 0.1**2 + 100 * 0.1 * 0.01))
    for k in range(3):
        late.measure(np.array([0.02 * (k + 1)]), 0.01 * (k + 1))
    assert late.level == pytest.approx(2.0 - 50 * 0.1**2), "the dearest of all that was measured"
    noisy = tank(springs(100.0, 20.0), noise=1e-3)
    noisy.command(np.array([0.1]))
    assert noisy.level == pytest.approx(2.0 - (50 * 0.1**2 + 100 * 0.1 * 2e-3))
    before = noisy.level
    for k in range(6):
        noisy.measure(np.array([0.004 * (k == 5)]), 0.01 * (k + 1))
    assert noisy.level == before, "what may be noise refills nothing"


def test_the_pull_of_a_spring_ends_at_its_stretch() -> None:
    """Beyond 0.1 m a spring of 100 N/m pulls with 10 N: 0.2 m further cost 2 J."""
    books = tank(springs(100.0, stretch=0.1))
    books.command(np.array([0.1]))
    books.measure(np.zeros(1), 0.01)
    assert books.level == pytest.approx(1.5)
    books.command(np.array([0.2]))
    books.measure(np.zeros(1), 0.02)
    assert books.level == pytest.approx(0.5)


def test_stiffness_is_paid_for_by_how_far_the_spring_is_stretched() -> None:
    """50 N/m that should become 150 at 0.1 m: 0.5 J, of which 2 W for 10 ms pay none; 50 W pay
    all. Softer again is always done, and gives its energy back."""
    for power, share in ((2.0, 0.02), (20.0, 0.4), (50.0, 1.0)):
        config = TankConfig(**{**TANK, "power": power})
        held = Held(np.array([50.0]), np.zeros(1), np.array([np.inf]))
        arm = FilteredSprings(config, held, np.zeros(1), 0.01)
        here, place = np.array([0.1]), np.zeros(1)
        assert arm(here, 0.0, place, np.array([150.0])) == pytest.approx(share)
        assert arm.stiffness == pytest.approx(50 + share * 100)
        arm(here, 0.01, place, np.array([50.0]))
        assert arm.stiffness == pytest.approx(50.0)
        arm(here, 0.02, place, np.array([50.0]))
        assert arm.tank.level == pytest.approx(2.0)


def oscillate(filtered: bool, damping: float = 0.0, wall: float = 0.0) -> tuple[list[float], float]:
    """Total energy of a mass of 2 kg on a spring of 50 N/m that gets 600 more whenever the mass is
    on its way back, in 3 s of 0.5 ms, the tank counted where there is one; and its least level.
    `wall`: N/m of an elastic one, 2 cm away."""
    mass, dt, soft = 2.0, 5e-4, np.array([50.0])
    spring = FilteredSprings(TankConfig(**TANK), springs(50.0, damping), np.array([0.05]), dt)
    spring.tank.command(np.zeros(1))
    x, v, totals, least = np.array([0.05]), np.zeros(1), [], np.inf
    for k in range(6000):
        wanted = soft + (600.0 if float(v @ x) < 0 else 0.0)
        spring(x, k * dt, np.zeros(1), wanted)
        stiffness = spring.stiffness.copy() if filtered else wanted
        deep = np.maximum(-0.02 - x, 0.0)
        stored = 0.5 * float(mass * v @ v + stiffness @ (x * x) + wall * deep @ deep)
        totals.append(stored + (float(spring.tank.level) if filtered else 0.0))
        least = min(least, float(spring.tank.level))
        force = -stiffness * x - damping * np.sqrt(stiffness / 50) * v + wall * deep
        v = v + force / mass * dt
        x = x + v * dt
    return totals, least


@pytest.mark.parametrize("wall", [0.0, 3000.0])
def test_without_a_tank_the_adversary_pumps_the_mass_up(wall: float) -> None:
    totals, _ = oscillate(filtered=False, wall=wall)
    assert totals[-1] > 1e4 * totals[0]


@pytest.mark.parametrize("wall", [0.0, 3000.0])
@pytest.mark.parametrize("damping", [0.0, 5.0])
def test_with_a_tank_the_energy_stays_bounded(damping: float, wall: float) -> None:
    totals, least = oscillate(filtered=True, damping=damping, wall=wall)
    assert max(totals) <= totals[0] * 1.015
    assert least >= 0.99 * TANK["least"]


def joint(q: float) -> ArmState:
    return ArmState(np.array([q]), np.zeros(1), np.zeros(1), 0.0)


def test_a_moving_set_point_is_paid_for_and_then_stops() -> None:
    """A joint held by 100 N m/rad against a wall: pushing the set-point by s costs 50 s^2 J."""
    config = Config(**{**TANK, "power": 1e9}, stiffness=(100.0,), damping=(0.0,))
    stage = Energy(config, ONE, 0.01)
    chain = Chain([stage], Limiter(ONE, 0.01))
    chain.begin(joint(0.0))
    sent = [float(chain(np.array([1.0]), 0.0, joint(0.0), 0.0)[0]) for _ in range(600)]
    # 1.9 J until the tank is at its least: 50 s^2 = 1.9.
    assert max(sent) == pytest.approx((1.9 / 50) ** 0.5, abs=0.01)
    assert stage.tank.level == pytest.approx(0.1, abs=0.05) and chain.counts[0] > 0
    free = Energy(Config(**TANK, stiffness=(100.0,), damping=(0.0,)), ONE, 0.01)
    chain = Chain([free], Limiter(ONE, 0.01))
    chain.begin(joint(0.0))
    q = 0.0
    for _ in range(400):  # an arm that follows at once costs next to nothing
        q = float(chain(np.array([1.0]), 0.0, joint(q), 0.0)[0])
    assert q == pytest.approx(1.0, abs=1e-3)


def test_springs_on_the_tool_are_booked_there() -> None:
    """The FR3's tool blocked at its home, and pushed: 250 d^2 J for d metres, and the turn."""
    limits = Limits(
        tuple(fr3.LOWER), tuple(fr3.UPPER), (0.0,) * 7, (1.0,) * 7, (10.0,) * 7, (500.0,) * 7,
        (1e3,) * 7, (9.0,) * 7,
    )  # fmt: skip

    def poses(q: Floats) -> Floats:
        place, turn, _ = fr3.forward(q)
        return np.concatenate([place, turn.reshape(len(q), 9)], 1)

    config = Config(**TANK, frame="tool", stiffness=(500.0,) * 3 + (30.0,) * 3, damping=(0.0,) * 6)
    stage = Energy(config, limits, 0.01, poses)
    chain = Chain([stage], Limiter(limits, 0.01))
    arm = ArmState(fr3.HOME.copy(), np.zeros(7), np.zeros(7), 0.0)
    chain.begin(arm)
    for _ in range(400):
        sent = chain(fr3.HOME + 0.5, 0.0, arm, 0.0).copy()
    far = tool_error(*poses(np.stack([sent, fr3.HOME])))
    stored = 250 * far[:3] @ far[:3] + 15 * far[3:] @ far[3:]
    assert stored == pytest.approx(1.9, abs=0.1)
    assert stage.tank.level == pytest.approx(2.0 - stored, abs=1e-2)


def test_a_commanded_stiffness_is_filtered_and_passed_on() -> None:
    """A set-point 0.1 rad ahead of a blocked joint: 20 N m/rad cost 0.1 J, 200 would cost 1 J."""
    config = Config(**{**TANK, "start": 0.5}, stiffness=(200.0,), damping=(0.0,))
    stage = Energy(config, ONE, 0.01)
    stage.begin(joint(0.0))

    def turn(to: float, stiffness: float | None) -> Tick:
        wanted = None if stiffness is None else np.array([stiffness])
        tick = Tick(np.array([to]), np.array([to]), joint(0.0), 0.0, 0.0, stiffness=wanted)
        stage(tick)
        return tick

    assert turn(0.0, 20.0).stiffness == pytest.approx(20.0)
    assert turn(0.1, 20.0).stiffness == pytest.approx(20.0)
    assert turn(0.1, 20.0).stiffness == pytest.approx(20.0)
    assert stage.tank.level == pytest.approx(0.5 - 0.1)
    assert turn(0.1, 200.0).stiffness == pytest.approx(20 + 0.3 * 180), "0.3 J pay for a third"
    assert turn(0.1, None).stiffness is None
    assert "none of the arm's" in turn(0.1, np.nan).fault
    stage.begin(joint(0.0))
    assert turn(0.0, None).stiffness == pytest.approx(200.0), "afresh, with what was set up"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"start": 0.01}, "least <= start"),
        ({"stiffness": (1.0, 2.0)}, "needs 1 stiffnesses"),
        ({"delay": 0.01}, "with a delay, speed"),
        ({"noise": -1.0}, "noise, delay, late"),
        ({"late": 0.1}, "damping of .* or more to be passive"),
        ({"frame": "tool"}, "kinematics"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Energy(Config(**{**TANK, "stiffness": (1.0,), "damping": (0.01,), **wrong}), ONE, 0.01)
