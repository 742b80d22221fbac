"""The energy tank: its books by hand, and arms that would be pumped up without it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from embodied.core.build import ConfigError
from embodied.embodiments import fr3
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.chain import Chain, Tick
from embodied.real_robot.kernel.limiter import Limiter
from embodied.real_robot.safety.energy import (
    SHARES,
    Config,
    Energy,
    Held,
    Tank,
    TankConfig,
    stiffer,
    tool_error,
)
from tests.real_robot.test_control import LIMITS as FR3
from tests.tiers import usually


class FilteredSprings:
    """A set-point and a stiffness [..., m] of which only the share that the tank pays for is done.
    What becomes softer gives energy back, and is always done."""

    def __init__(self, config: TankConfig, held: Held, x: Floats, dt: float) -> None:
        self.tank = Tank(config, held, dt)
        self.tank.begin(x, held.stiffness, 0.0)
        self.dt = dt

    def __call__(self, x: Floats, now: float, place: Floats, stiffness: Floats) -> Floats:
        """The share [...] that is done of `place` and `stiffness` [..., m], for an arm measured at
        `x` [..., m]."""
        tank = self.tank
        tank.measure(x, now)
        shares = SHARES.reshape(-1, *[1] * x.ndim)
        places = tank.setpoint + shares * (place - tank.setpoint)
        cost = tank.cost(places, stiffer(tank.stiffness, stiffness, shares))
        affordable = cost <= tank.budget(self.dt)
        affordable[-1] = True
        done = SHARES[affordable.argmax(0)]
        share = done[..., None]
        setpoint = tank.setpoint + share * (place - tank.setpoint)
        tank.command(setpoint, stiffer(tank.stiffness, stiffness, share))
        return done


COUPLED, SHOULDER, ELBOW = 0.12, 0.62, 0.16  # kg m^2, of M(q) = [[a + 2 c cos, d + c cos], [., d]]
UPPER, FORE = 0.4, 0.3  # m


def inertia(q: Floats) -> Floats:
    """[..., 2, 2] at q [..., 2]."""
    c = COUPLED * np.cos(q[..., 1])
    row = np.stack([SHOULDER + 2 * c, ELBOW + c], -1)
    return np.stack([row, np.stack([ELBOW + c, np.full_like(c, ELBOW)], -1)], -2)


def accelerated(q: Floats, torque: Floats) -> Floats:
    """[..., 2] rad/s^2 by `torque` [..., 2]: the inverse of a 2 x 2 matrix, written out."""
    c = COUPLED * np.cos(q[..., 1])
    a, b, first, second = SHOULDER + 2 * c, ELBOW + c, torque[..., 0], torque[..., 1]
    one, two = ELBOW * first - b * second, a * second - b * first
    return np.stack([one, two], -1) / (a * ELBOW - b * b)[..., None]


def tool(q: Floats) -> Floats:
    """Where the tool is [..., 2], m."""
    a, b = q[..., 0], q[..., 0] + q[..., 1]
    x, y = UPPER * np.cos(a) + FORE * np.cos(b), UPPER * np.sin(a) + FORE * np.sin(b)
    return np.stack([x, y], -1)


def jacobian(q: Floats) -> Floats:
    """Of the tool [..., 2, 2]."""
    a, b = q[..., 0], q[..., 0] + q[..., 1]
    left, below = -FORE * np.sin(b), FORE * np.cos(b)
    top = np.stack([left - UPPER * np.sin(a), left], -1)
    return np.stack([top, np.stack([below + UPPER * np.cos(a), below], -1)], -2)


@dataclass
class TwoLink:
    """`q`, `dq` [..., 2]; no gravity. Springs and dampers on the joints, or `on_tool`. `given`:
    work [...] that the outside torques have done, J. `felt` [..., 2]: where springs that are late
    take the arm to be (None: where it is)."""

    q: Floats
    dq: Floats
    stiffness: Floats
    damping: Floats
    on_tool: bool = False
    felt: Floats | None = None

    def __post_init__(self) -> None:
        self.setpoint = self.place.copy()
        self.given = np.zeros(self.q.shape[:-1])

    @property
    def place(self) -> Floats:
        """Of the springs' ends [..., 2]."""
        return tool(self.q) if self.on_tool else self.q

    def run(self, seconds: float, push: Floats, step: float = 1e-3) -> None:
        """Under `push` [..., 2] (N m) from outside; symplectic Euler steps."""
        for _ in range(round(seconds / step)):
            q, dq = self.q, self.dq
            h = COUPLED * np.sin(q[..., 1])
            bias = np.stack(
                [-h * (2 * dq[..., 0] * dq[..., 1] + dq[..., 1] ** 2), h * dq[..., 0] ** 2], -1
            )
            self.dq = dq + step * accelerated(q, self._held() + push - bias)
            self.q = q + step * self.dq
            self.given += (push * (self.q - q)).sum(-1)

    def _held(self) -> Floats:
        e = self.setpoint - (self.place if self.felt is None else self.felt)
        if not self.on_tool:
            return self.stiffness * e - self.damping * self.dq
        turn = jacobian(self.q)
        speed = (turn @ self.dq[..., None])[..., 0]
        force = self.stiffness * e - self.damping * speed
        return (turn.swapaxes(-1, -2) @ force[..., None])[..., 0]

    def energy(self) -> Floats:
        """Kinetic and in the springs [...], J."""
        moving = 0.5 * np.einsum("...i,...ij,...j->...", self.dq, inertia(self.q), self.dq)
        return moving + 0.5 * (self.stiffness * (self.setpoint - self.place) ** 2).sum(-1)


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


def test_all_that_was_sent_between_two_measurements_is_booked() -> None:
    books = tank(springs(100.0))
    books.command(np.array([0.1]))
    books.command(np.array([0.1]), np.array([200.0]))
    books.command(np.array([0.15]))
    books.measure(np.zeros(1), 0.01)
    assert books.level == pytest.approx(2.0 - 100 * 0.15**2)


def test_a_spring_beyond_its_stretch_costs_its_force_times_the_way() -> None:
    """Beyond 0.1 m a spring of 100 N/m pulls with 10 N: 0.2 m further cost 2 J."""
    books = tank(springs(100.0, stretch=0.1))
    for tick, (place, level) in enumerate(((0.1, 1.5), (0.2, 0.5)), 1):
        books.command(np.array([place]))
        books.measure(np.zeros(1), 0.01 * tick)
        assert books.level == pytest.approx(level)


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


def joint(q: float) -> ArmState:
    return ArmState(np.array([q]), np.zeros(1), np.zeros(1), 0.0)


def on_joint(**more: Any) -> Energy:
    """The stage of a joint that is held by 100 N m/rad."""
    settings = {**TANK, "stiffness": (100.0,), "damping": (0.0,), **more}
    return Energy(Config(**settings), ONE, 0.01)


@pytest.mark.parametrize("follows", [False, True])
def test_a_moving_set_point_is_paid_for_and_then_stops(follows: bool) -> None:
    """Against a wall, pushing the set-point by s costs 50 s^2 J; an arm that follows at once costs
    next to nothing."""
    stage = on_joint(power=1e9)
    chain = Chain([stage], Limiter(ONE, 0.01))
    chain.begin(joint(0.0))
    q = sent = 0.0
    for _ in range(600):
        sent = float(chain(np.array([1.0]), 0.0, joint(q), 0.0)[0])
        q = sent if follows else 0.0
    if follows:
        assert sent == pytest.approx(1.0, abs=1e-3)
    else:  # 1.9 J until the tank is at its least: 50 s^2 = 1.9
        assert sent == pytest.approx((1.9 / 50) ** 0.5, abs=0.01)
        assert stage.tank.level == pytest.approx(0.1, abs=0.05) and chain.counts[0] > 0


def test_springs_on_the_tool_are_booked_there() -> None:
    """The FR3's tool blocked at its home, and pushed: 250 d^2 J for d metres, and the turn."""

    def poses(q: Floats) -> Floats:
        place, turn, _ = fr3.forward(q)
        return np.concatenate([place, turn.reshape(len(q), 9)], 1)

    config = Config(**TANK, frame="tool", stiffness=(500.0,) * 3 + (30.0,) * 3, damping=(0.0,) * 6)
    stage = Energy(config, FR3, 0.01, poses)
    chain = Chain([stage], Limiter(FR3, 0.01))
    arm = ArmState(fr3.HOME.copy(), np.zeros(7), np.zeros(7), 0.0)
    chain.begin(arm)
    for _ in range(400):
        sent = chain(fr3.HOME + 0.5, 0.0, arm, 0.0).copy()
    far = tool_error(*poses(np.stack([sent, fr3.HOME])))
    stored = 250 * far[:3] @ far[:3] + 15 * far[3:] @ far[3:]
    assert stored == pytest.approx(1.9, abs=0.1)
    assert stage.tank.level == pytest.approx(2.0 - stored, abs=1e-2)


def turn(stage: Energy, to: float, stiffness: float | None, last: float | None = None) -> Tick:
    """A tick of a joint that is blocked at 0: `to`, after `last`, and a stiffness are asked for."""
    wanted = None if stiffness is None else np.array([stiffness])
    before = np.array([to if last is None else last])
    tick = Tick(np.array([to]), before, joint(0.0), 0.0, 0.0, stiffness=wanted)
    stage(tick)
    return tick


def test_a_commanded_stiffness_is_filtered_and_passed_on() -> None:
    """A set-point 0.1 rad ahead of a blocked joint: 20 N m/rad cost 0.1 J, 200 would cost 1 J."""
    stage = on_joint(start=0.5, stiffness=(200.0,))
    stage.begin(joint(0.0))
    for to in (0.0, 0.1, 0.1):
        assert turn(stage, to, 20.0).stiffness == pytest.approx(20.0)
    assert stage.tank.level == pytest.approx(0.5 - 0.1)
    third = turn(stage, 0.1, 200.0).stiffness
    assert third == pytest.approx(20 + 0.3 * 180), "0.3 J pay for a third"
    assert turn(stage, 0.1, 20.0).stiffness == pytest.approx(20.0)
    assert turn(stage, 0.1, None).stiffness is None
    assert stage.tank.level == pytest.approx(0.5 - 0.1), "what becomes softer gives it back"
    assert "none of the arm's" in turn(stage, 0.1, np.nan).fault
    stage.begin(joint(0.0))
    assert turn(stage, 0.0, None).stiffness == pytest.approx(200.0), "afresh, with what was set up"


def test_springs_become_softer_where_the_tank_pays_for_no_step() -> None:
    stage = on_joint(start=0.1001, stiffness=(200.0,))
    stage.begin(joint(0.0))
    for wanted in (100.0, 50.0):
        tick = turn(stage, 1.0, wanted, last=0.0)
        assert tick.stiffness == pytest.approx(wanted) and tick.q < 0.01


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"start": 0.01}, "least <= start"),
        ({"stiffness": (1.0, 2.0)}, "needs 1 stiffnesses"),
        ({"delay": 0.01}, "with a delay, speed"),
        ({"noise": -1.0}, "noise, delay, late"),
        ({"stiffness": (1.0,), "damping": (0.01,), "late": 0.1}, "damping of .* or more to be"),
        ({"frame": "tool"}, "kinematics"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        on_joint(**wrong)


STIFFNESS, DAMPING = np.array([200.0, 100.0]), np.array([14.0, 8.0])
TOOL, DAMPED = np.array([500.0, 300.0]), np.array([45.0, 35.0])
LIMITS = Limits(*((value,) * 2 for value in (-3.0, 3.0, 0.0, 3.0, 20.0, 1e3, 1e3, 9.0)))


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


def chained(seed: int, noise: float, delay: float, seconds: float = 2.0) -> float:
    """The most that energy and tank of an arm behind the safety chain rose by, J, with set-points
    that jump, pushes, and velocities measured with a noise of 0.1 rad/s."""
    random, dt = np.random.default_rng(seed), 0.01
    held = {"stiffness": tuple(STIFFNESS), "damping": tuple(DAMPING)}
    config = Config(**TANK, **held, noise=noise, delay=delay, speed=4.0)
    stage = Energy(config, LIMITS, dt)
    chain, measured = Chain([stage], Limiter(LIMITS, dt)), Measured(random, noise, delay, dt)
    arm = TwoLink(random.uniform(-1, 1, 2), np.zeros(2), STIFFNESS, DAMPING)
    chain.begin(ArmState(arm.q, arm.dq, np.zeros(2), 0.0))
    first, most = arm.energy() + stage.tank.level, -np.inf
    for k in range(round(seconds / dt)):
        if k % 20 == 0:
            target, push = random.uniform(-2, 2, 2), random.normal(0, 5, 2)
        state = ArmState(measured(arm.q), arm.dq + random.normal(0, 0.1, 2), np.zeros(2), k * dt)
        sent = chain(target, k * dt, state, k * dt).copy()
        # What was sent before is in the books now, what is sent now is not yet.
        most = max(most, float(arm.energy() + stage.tank.level - first - arm.given))
        arm.setpoint = sent
        arm.run(dt, push, 1e-3)
    return most


@pytest.mark.parametrize(("noise", "delay"), [(0.0, 0.0), (1e-3, 0.0), (0.0, 0.035), (1e-3, 0.035)])
def test_a_coupled_arm_behind_the_chain(noise: float, delay: float) -> None:
    for seed in range(4):
        assert chained(seed, noise, delay) < 0.01 * TANK["start"]


@dataclass(frozen=True)
class Case:
    """`late`: the springs know the position as late as the tank does, and are held over the tick;
    otherwise they are the robot's own, and only the tank knows it late. `free`: all is done that is
    wanted, whatever is in the tank."""

    noise: float
    delay: float
    dt: float = 0.01
    on_tool: bool = False
    late: bool = False
    free: bool = False
    speed: float = 6.0
    seconds: float = 0.4

    def held(self) -> Held:
        stiffness, damping = (TOOL, DAMPED) if self.on_tool else (STIFFNESS, DAMPING)
        return Held(stiffness, damping, np.full(2, np.inf))

    def config(self) -> TankConfig:
        late = self.delay + self.dt if self.late else 0.0
        return TankConfig(**TANK, noise=self.noise, delay=self.delay, speed=self.speed, late=late)


def rollouts(case: Case, count: int, seed: int = 0) -> tuple[Floats, Floats]:
    """What energy and tank [count] rose by at most, and the tank's least, J, when set-points and
    stiffness are commanded that pump (a set-point ahead of the motion, stiffer on the way back) and
    hands push."""
    random, batch, dt = np.random.default_rng(seed), (count, 2), case.dt
    held, ticks = case.held(), round(case.seconds / dt)
    start = random.uniform([-1, 0.5], [1, 2.5], batch)
    stiff = np.broadcast_to(held.stiffness, batch)
    arm = TwoLink(start, random.normal(0, 0.5, batch), stiff, held.damping, case.on_tool)
    measured, place = Measured(random, case.noise, case.delay, dt), arm.place
    springs, scale = FilteredSprings(case.config(), held, place, dt), 0.2 if case.on_tool else 0.5
    tank, rose, least = springs.tank, np.full(count, -np.inf), np.full(count, np.inf)
    first, before = arm.energy() + TANK["start"], arm.place
    for k in range(ticks):
        if k % round(0.1 / dt) == 0:
            push, ahead = random.normal(0, 5, batch), scale * random.uniform(-0.5, 1, batch)
            high = random.uniform(0.3, 1.0, batch) * held.stiffness
        seen, last = measured(arm.place), arm.place
        moving, before = np.sign(last - before), last
        wanted = seen + ahead * moving
        stiff = np.where((place - seen) * moving > 0, high, 0.2 * high)
        springs(seen, k * dt, wanted, stiff)
        place = wanted if case.free else tank.setpoint.copy()
        stiff = stiff if case.free else tank.stiffness.copy()
        arm.setpoint, arm.stiffness = place, stiff
        arm.damping = held.damping * np.sqrt(stiff / held.stiffness)
        arm.felt = seen if case.late else None
        rose = np.maximum(rose, arm.energy() + tank.level - first - arm.given)
        least = np.minimum(least, tank.level)
        arm.run(dt, push)
    return rose, least


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


SLOW = ("tool, noise, 2 ms", "tool, noise, 5 ms", "late springs on the tool, 35 ms")


def test_without_a_tank_the_same_commands_pump_arms_up() -> None:
    rose, _ = rollouts(replace(CASES["exact"], free=True, seconds=1.0), 100)
    assert np.median(rose) > 5 * TANK["start"]


@pytest.mark.parametrize("name", usually({*CASES} - {*SLOW}, CASES))
def test_ten_thousand_arms(name: str, request: pytest.FixtureRequest) -> None:
    for seed in range(10 if request.config.getoption("--all") else 2):  # thousands
        rose, least = rollouts(CASES[name], 1000, seed=seed)
        assert rose.max() < 0.01 * TANK["start"]
        assert least.min() > 0.99 * TANK["least"], "what it cannot pay for, it does not do"
