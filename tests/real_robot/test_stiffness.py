"""Springs on joints or the tool that become softer while they hold an arm, with an energy tank, on
a simulated FR3 and a test's clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml

from embodied.core.build import ConfigError
from embodied.embodiments import fr3
from embodied.real_robot.assemble import build_chain
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.driver import (
    Driver,
    DryRunDriver,
    Tool,
    tool_springs,
)
from embodied.real_robot.drivers.replay import Config as ReplayConfig
from embodied.real_robot.drivers.replay import Replay
from embodied.real_robot.drivers.sim import Config, Sim
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.chain import Chain, Tick
from embodied.real_robot.kernel.checks import Enabled
from embodied.real_robot.kernel.driver import DriverError, springs_of, stiffen
from embodied.real_robot.kernel.limiter import Limiter
from embodied.real_robot.kernel.messages import Command, Mode
from embodied.real_robot.safety.energy import Config as EnergyConfig
from embodied.real_robot.safety.energy import Energy
from tests.builders import Clock
from tests.real_robot.test_control import Bench

pytest.importorskip("franky_sim", reason="franky-sim is not installed")


def pushed(driver: Sim, clock: Clock, share: float, force: Floats) -> Floats:
    """Joint positions to which the arm gives way in the end, under `force` [7] (N m) and with that
    share of its stiffness."""
    span = driver.stiffness
    assert span is not None
    driver.stiffen(share * span[1])
    driver.data.qfrc_applied[driver.dof] = force
    for _ in range(300):
        clock.now += 0.01
        q = driver.read().q
        driver.write(fr3.HOME, 0.08)
    return q


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_softer_spring_gives_way_further(share: float) -> None:
    clock = Clock(0.0)
    with Sim(Config(), clock) as driver:
        span = driver.stiffness
        assert span is not None and np.array_equal(span[1], fr3.STIFFNESS)
        q = pushed(driver, clock, share, 70.0 * np.eye(7)[3])
        assert abs(q[3] - fr3.HOME[3]) == pytest.approx(70 / (2000 * share), rel=0.02)


@pytest.mark.parametrize("wrong", [np.zeros(7), np.full(7, np.nan), np.ones(3)])
def test_a_stiffness_that_it_does_not_have_is_refused(wrong: np.ndarray) -> None:
    for driver in (Sim(Config(), Clock(0.0)), DryRunDriver(Sim(Config(), Clock(0.0)))):
        with driver, pytest.raises(DriverError, match=r"takes|was asked"):
            driver.stiffen(wrong)
    none: Driver = Replay(ReplayConfig("nothing.npz"))
    assert springs_of(none) is None
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


@pytest.mark.parametrize(
    ("tool", "share", "push", "least", "most"),
    [
        (Tool(), 1.0, 10.0, 0.017, 0.023),
        (Tool(), 0.5, 10.0, 0.034, 0.046),
        (Tool(force=8.0), 1.0, 12.0, 0.1, np.inf),  # more than `force` cannot be held
    ],
)
def test_springs_on_the_tool_give_way_as_their_settings_say(
    tool: Tool, share: float, push: float, least: float, most: float
) -> None:
    """10 N along y against 500 N/m are 2 cm."""
    world = {"_target_": "embodied.envs.hardware_sim.fr3_task.TaskWorld", "task": "reach"}
    clock = Clock(0.0)
    place, _, jacobian = fr3.forward(fr3.HOME[None])
    with Sim(Config(tool=tool, world=world), clock) as driver:
        q = pushed(driver, clock, share, jacobian[0, 1] * push)
    moved = (fr3.forward(q[None])[0] - place)[0]
    assert least < moved[1] < most
    if most < np.inf:
        assert moved[[0, 2]] == pytest.approx([0, 0], abs=0.15 * moved[1])


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


def settings() -> dict[str, Any]:
    """configs/robot/sim_impedance.yaml without its `_target_`."""
    file = Path(__file__).resolve().parents[2] / "configs" / "robot" / "sim_impedance.yaml"
    node = yaml.safe_load(file.read_text())
    node.pop("_target_")
    return node | {"policy": "nobody"}


@pytest.mark.parametrize(("tank", "least", "most"), [(True, 0.0, 3.0), (False, 6.0, np.inf)])
def test_a_pressed_tool_takes_no_more_than_the_tank_has(
    tank: bool, least: float, most: float
) -> None:
    """The tool is blocked by a stiff hand while its set-point is led 20 cm away: what the springs
    hold in the end is what the tank has paid; without the tank it would be several times that."""
    node = settings()
    # No bound of the pull, of tracking and force: what bounds the energy here is the tank.
    node["limits"]["tracking"] = [2.0] * 7
    node["force"] = "unmeasured"
    node["energy"] = {**node["energy"], "stretch": []} if tank else None
    chain, clock = build_chain(Deployment.parse(node)), Clock(0.0)
    tool = Tool(**{**node["driver"]["tool"], "force": 3000.0, "torque": 3000.0})
    with Sim(Config(tool=tool), clock) as driver:
        arm = driver.read()
        chain.begin(arm)
        place, _, jacobian = fr3.forward(arm.q[None])
        towards = arm.q + jacobian[0].T @ np.array([0, 0, 0.7, 0, 0, 0])
        chain.required(Enabled).on = True
        for _ in range(100):
            clock.now += 0.01
            arm = driver.read()
            off = fr3.forward(arm.q[None])[0] - place
            driver.data.qfrc_applied[driver.dof] = jacobian[0, :3].T @ (-20_000 * off[0])
            sent = chain(towards, clock.now, arm, clock.now)
            assert not chain.fault, chain.fault
            driver.write(sent, 0.08)
    far = fr3.forward(sent[None])[0][0] - place[0]
    assert least < 250 * float(far @ far) < most


def test_a_stage_softens_the_springs_of_the_driver_and_they_stay_what_they_were_set_up(
    tmp_path: Path,
) -> None:
    """What the chain says reaches the driver; a stiffness that it does not have is a fault."""
    bench = Bench(tmp_path)
    bench.run(2)
    stage = Softens(0.4 * np.asarray(fr3.STIFFNESS))
    bench.control.chain.stages.append(stage)
    bench.ask(Command.ARM)
    bench.run(2)
    driver = bench.control.driver
    assert isinstance(driver, Sim)
    assert driver.model.actuator_gainprm[driver.servos, 0] == pytest.approx(stage.wanted)
    stage.wanted = 5.0 * stage.wanted
    bench.run(2)
    assert bench.mode == Mode.ESTOP and "was asked for a stiffness" in bench.fault


def test_the_yaml_of_the_tank_is_that_of_its_springs() -> None:
    node = settings()
    with Sim(Config(tool=Tool(**node["driver"]["tool"]))) as driver:
        build_chain(Deployment.parse(node)).check(driver.springs)
