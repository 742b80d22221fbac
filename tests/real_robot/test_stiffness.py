"""Springs that become softer while they hold an arm, on a simulated FR3 and a test's clock."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from embodied.core.build import ConfigError
from embodied.embodiments import fr3
from embodied.real_robot.drivers.driver import (
    Driver,
    DryRunDriver,
    Tool,
    stiffness_of,
    tool_springs,
)
from embodied.real_robot.drivers.replay import Config as ReplayConfig
from embodied.real_robot.drivers.replay import Replay
from embodied.real_robot.drivers.sim import Config, Sim
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.chain import Chain, Tick
from embodied.real_robot.kernel.driver import DriverError, springs_of, stiffen
from embodied.real_robot.kernel.limiter import Limiter
from embodied.real_robot.safety.energy import Config as EnergyConfig
from embodied.real_robot.safety.energy import Energy
from tests.builders import Clock

pytest.importorskip("franky_sim", reason="franky-sim is not installed")


def sags(driver: Sim, clock: Clock, push: float) -> float:
    """How far joint 4 gives way to `push` (N m) in the end, rad."""
    driver.data.qfrc_applied[driver.dof[3]] = push
    for _ in range(200):
        clock.now += 0.01
        q = driver.read().q
        driver.write(fr3.HOME, 0.08)
    return abs(float(q[3] - fr3.HOME[3]))


def test_a_softer_spring_gives_way_further() -> None:
    clock = Clock(0.0)
    with Sim(Config(), clock) as driver:
        span = driver.stiffness
        assert span is not None and np.array_equal(span[1], fr3.STIFFNESS)
        stiff = sags(driver, clock, 70.0)
        driver.stiffen(0.5 * span[1])
        soft = sags(driver, clock, 70.0)
        assert stiff == pytest.approx(70 / 2000, rel=0.02)
        assert soft == pytest.approx(70 / 1000, rel=0.02)


@pytest.mark.parametrize("wrong", [np.zeros(7), np.full(7, np.nan), np.ones(3)])
def test_a_stiffness_that_it_does_not_have_is_refused(wrong: np.ndarray) -> None:
    for driver in (Sim(Config(), Clock(0.0)), DryRunDriver(Sim(Config(), Clock(0.0)))):
        with driver, pytest.raises(DriverError, match=r"takes|was asked"):
            driver.stiffen(wrong)
    none: Driver = Replay(ReplayConfig("nothing.npz"))
    assert springs_of(none) is None and stiffness_of(none) is None
    with pytest.raises(DriverError, match="Replay cannot change its stiffness"):
        stiffen(none, np.ones(7))


class Softens:
    """A stage that asks for other springs."""

    name: ClassVar[str] = "reflex"

    def __init__(self, wanted: Floats) -> None:
        self.wanted = wanted

    def begin(self, arm: ArmState) -> None: ...

    def __call__(self, tick: Tick) -> None:
        tick.stiffness = self.wanted


def test_a_stage_may_ask_for_it() -> None:
    limits = Limits((-3.0,), (3.0,), (0.0,), (1.0,), (10.0,), (500.0,), (1e3,), (9.0,))
    arm = ArmState(np.zeros(1), np.zeros(1), np.zeros(1), 0.0)
    for stages, wanted in (([], None), ([Softens(np.array([5.0]))], [5.0])):
        chain = Chain(stages, Limiter(limits, 0.01))
        chain.begin(arm)
        chain(np.zeros(1), 0.0, arm, 0.0)
        told = chain.stiffness
        assert (None if told is None else told.tolist()) == wanted


def pushed(driver: Sim, clock: Clock, force: float, stiffness: float = 1.0) -> Floats:
    """How far the tool gives way to `force` (N, along y) in the end [3], m; `stiffness` is a share
    of the springs'."""
    span = driver.stiffness
    assert span is not None
    driver.stiffen(stiffness * span[1])
    place, _, jacobian = fr3.forward(fr3.HOME[None])
    for _ in range(300):
        driver.data.qfrc_applied[driver.dof] = jacobian[0, 1] * force
        clock.now += 0.01
        q = driver.read().q
        driver.write(fr3.HOME, 0.08)
    return (fr3.forward(q[None])[0] - place)[0]


def test_springs_on_the_tool_give_way_as_their_settings_say() -> None:
    """10 N against 500 N/m are 2 cm, against half of it 4 cm; more than `force` cannot be held."""
    world = {"_target_": "embodied.envs.hardware_sim.fr3_task.TaskWorld", "task": "reach"}
    for share, far in ((1.0, 0.02), (0.5, 0.04)):
        clock = Clock(0.0)
        with Sim(Config(tool=Tool(), world=world), clock) as driver:
            moved = pushed(driver, clock, 10.0, share)
            assert moved == pytest.approx([0, far, 0], abs=0.15 * far)
    clock = Clock(0.0)
    with Sim(Config(tool=Tool(force=8.0), world=world), clock) as driver:
        assert pushed(driver, clock, 12.0)[1] > 0.1, "it gives way"


def test_springs_on_the_tool_follow_stop_and_let_go() -> None:
    clock = Clock(0.0)
    to = fr3.HOME + 0.1 * np.array([1, 1, -1, 1, -1, 1, 1])
    place = fr3.forward(to[None])[0][0]
    with Sim(Config(tool=Tool()), clock) as driver:
        for k in range(400):
            clock.now += 0.01
            q = driver.read().q
            driver.write(fr3.HOME + min(1.0, k / 100) * (to - fr3.HOME), 0.08)
        assert np.linalg.norm(fr3.forward(q[None])[0][0] - place) < 0.01
        driver.stop()
        driver.release()
        driver.data.qfrc_applied[driver.dof[0]] = 5.0
        for _ in range(100):
            clock.now += 0.01
            away = driver.read().q
        assert abs(away[0] - q[0]) > 0.1, "a released arm is guided by a light push"


def test_the_tank_has_to_book_the_springs_of_the_driver() -> None:
    springs = tool_springs(Tool())
    tank = {"start": 1.0, "most": 1.0, "least": 0.1, "power": 1.0, "frame": "tool"}
    names = ("stiffness", "damping", "stretch")
    fine = {name: tuple(getattr(springs, name)) for name in names}
    limits = Limits(*((value,) * 7 for value in (-3.0, 3.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0)))

    def check(**wrong: Any) -> None:
        stage = Energy(EnergyConfig(**{**tank, **fine, **wrong}), limits, 0.01, lambda q: q)
        Chain([stage], Limiter(limits, 0.01)).check(springs)

    check()
    for wrong, says in (
        ({"stiffness": (400.0,) * 6}, "stiffness is .* the driver's is"),
        ({"damping": (60.0,) * 6}, "damping is .* only"),
        ({"stretch": ()}, "stretch is"),
        ({"frame": "joints", **{name: (1.0,) * 7 for name in names}}, "springs are on the tool"),
    ):
        with pytest.raises(ConfigError, match=says):
            check(**wrong)
