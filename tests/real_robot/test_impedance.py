"""Cartesian impedance with an energy tank: the robot YAML, its chain, and a deployment of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from embodied.embodiments import fr3
from embodied.real_robot.assemble import build_chain
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.driver import Tool
from embodied.real_robot.drivers.sim import Config, Sim
from embodied.real_robot.kernel.checks import Enabled
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.messages import Command, Mode
from tests.builders import Clock
from tests.real_robot.test_control import Bench
from tests.real_robot.test_stiffness import Softens

pytest.importorskip("franky_sim", reason="franky-sim is not installed")

ROBOTS = Path(__file__).resolve().parents[2] / "configs" / "robot"


def settings() -> dict[str, Any]:
    """configs/robot/sim_impedance.yaml without its `_target_`."""
    node = yaml.safe_load((ROBOTS / "sim_impedance.yaml").read_text())
    node.pop("_target_")
    return node | {"policy": "nobody"}


def test_a_pressed_tool_takes_no_more_than_the_tank_has() -> None:
    """The tool is blocked by a stiff hand while its set-point is led 20 cm away: what the springs
    hold in the end is what the tank has paid; without the tank it would be several times that."""
    held: dict[bool, float] = {}
    for tank in (True, False):
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
        held[tank] = 250 * float(far @ far)
    assert held[True] < 3.0 and held[False] > 2 * 3.0, held


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
    driver, chain = (
        Sim(Config(tool=Tool(**node["driver"]["tool"]))),
        build_chain(Deployment.parse(node)),
    )
    with driver:
        chain.check(driver.springs)
        with pytest.raises(DriverError, match="was asked for a stiffness"):
            driver.stiffen(np.full(6, 1e4))
