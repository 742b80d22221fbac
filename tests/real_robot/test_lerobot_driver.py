"""The driver of LeRobot's robots, with a stand-in for LeRobot's interface in a process of its own.
`tests/interop/test_lerobot_robot.py` runs it with LeRobot's SO follower on an emulated bus."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from embodied.core.build import ConfigError, build
from embodied.deploy.check import calibration
from embodied.embodiments import so101
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.drivers.lerobot.driver import Hand, Joint, LeRobotDriver, Units
from embodied.real_robot.kernel.arm_state import Limits
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.teleop.teleop import Device
from tests.builders import node_of, wait_until

INTERFACE = Path(__file__).parents[1] / "fakes" / "lerobot_interface"
JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll")
NODE: dict[str, Any] = {
    "_target_": "embodied.real_robot.drivers.lerobot.driver.LeRobotDriver",
    "type": "stand_in",
    "silence": 1.0,
    "joints": [{"key": f"{name}.pos", "sign": -1 if "lift" in name else 1} for name in JOINTS],
    "hand": {"key": "gripper.pos", "width": 0.07},
}
TURN = np.array([0.3, -0.2, 0.1, 0.2, -0.1])


@pytest.fixture(autouse=True)
def interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{INTERFACE}:{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture
def made() -> Iterator[Any]:
    drivers: list[Driver] = []

    def make(**settings: Any) -> LeRobotDriver:
        ours = [key for key in settings if key in NODE or key in ("hertz", "python")]
        given = {key: settings.pop(key) for key in ours}
        driver = build({**NODE, **given, "settings": settings}, LeRobotDriver)
        drivers.append(driver)
        return driver

    yield make
    for driver in drivers:
        driver.close()


def until(driver: Driver, q: np.ndarray[Any, Any], width: float) -> None:
    """Send it there, as the control loop would, until it is."""

    def there() -> bool:
        driver.write(q, width)
        return np.abs(driver.read().q - q).max() < 0.01 and abs(driver.width - width) < 0.002

    wait_until(there, tick=0.01)


def test_it_follows_in_our_units_and_keeps_torque(made: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    driver = made(log=str(log))
    driver.connect()
    state = driver.read()
    assert driver.joints == JOINTS
    np.testing.assert_allclose(state.q, 0, atol=1e-6)
    assert driver.width == pytest.approx(0.035) and not state.tau.any()
    until(driver, TURN, 0.07)
    assert driver.read().t > state.t
    driver.stop()
    driver.close()
    done = [json.loads(line) for line in log.read_text().splitlines()]
    assert done[-1] == ["disconnect", False], "torque stays on"
    goals = [[value[name] for name in JOINTS] for what, value in done if what == "goal"]
    np.testing.assert_allclose(goals[0], 0, atol=1e-6)
    np.testing.assert_allclose(goals[-1], np.degrees(TURN) * [1, -1, 1, 1, 1], atol=1.0)


def test_silence_is_a_fault(made: Any) -> None:
    driver = made(hangs=2.0, silence=0.5)
    driver.connect()
    with pytest.raises(DriverError, match="gave no measurement for"):
        wait_until(lambda: driver.read() is None)


def test_what_cannot_be_connected_is_one_line(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, **settings: Any) -> None:
        with pytest.raises(DriverError, match=match):
            made(**settings).connect()

    refused("embodied robot calibrate", calibrated=False)
    refused(r"LeRobot knows no nothing .known: stand_in", type="nothing")
    refused(r"cameras belong into robot.cameras", cameras={"front": {}})
    refused(r"does not measure hip.pos", joints=[{"key": "hip.pos"}])
    refused(r"takes \d+\.\d ms, and a period is 20.0 ms", read=0.04, hertz=50.0)
    made(read=0.04, hertz=5.0).connect()
    refused(r"in 5 attempts .*IndexError.*: look at its cable", damaged=5)
    made(damaged=4).connect()
    monkeypatch.setenv("PYTHONPATH", "")
    refused("pip install lerobot")
    refused("nowhere/python does not start", python="/nowhere/python")


def test_limits_beyond_its_calibration_are_refused(made: Any) -> None:
    driver = made()
    driver.connect()
    reach = driver.reach()
    assert reach is not None
    np.testing.assert_allclose(reach[1], np.radians(180 * 2300 / 4095), atol=1e-9)

    def limits(most: float) -> Limits:
        return Limits(*((v,) * 5 for v in (-most, most, 0.05, 1.0, 6.0, 150.0, 1.0, 1.0)))

    driver.check(limits(1.5))
    with pytest.raises(DriverError, match=r"shoulder_pan: the limits ask for -1.9"):
        driver.check(limits(2.0))
    for q, width in ((np.full(5, np.nan), 0.0), (np.zeros(5), float("inf"))):
        with pytest.raises(DriverError, match="no numbers"):
            driver.write(q, width)


@pytest.mark.parametrize("file", sorted(Path("configs/robot").glob("*.yaml")), ids=lambda f: f.stem)
def test_the_calibration_of_every_driver_can_be_remembered(file: Path) -> None:
    """After a good deployment, for the next check. LeRobot's joints have keys, others names."""
    driver = yaml.safe_load(file.read_text()).get("driver", {})
    site: Any = SimpleNamespace(deployment=SimpleNamespace(driver=driver))
    signs = [key for key in calibration(site) if key.endswith(".sign")]
    joints = driver.get("joints")
    rows = joints if isinstance(joints, list) else []
    assert len(signs) == sum("sign" in row for row in rows)


def test_ranges_become_rad_by_the_calibration() -> None:
    ready = {"ranges": {"elbow_flex": [1024, 3071.5]}}
    units = Units([Joint("elbow_flex.pos", "range", sign=-1)], ready)
    np.testing.assert_allclose(units.rad(np.array([100.0])), [-np.pi / 2])
    np.testing.assert_allclose(units.values(np.array([np.pi / 2])), [-100.0])
    with pytest.raises(ConfigError, match="give span"):
        Units([Joint("hip.pos", "range")], ready)
    known = Units([Joint("hip.pos", "range", span=2.0, zero=50.0)], {})
    np.testing.assert_allclose(known.rad(np.array([100.0])), [0.5])
    hand = Hand(closed=10, open=90, width=0.08)
    assert hand.opening(50) == pytest.approx(0.04) and hand.value(0.2) == 90


def test_a_dead_process_is_a_fault_and_a_reset_starts_it_again(made: Any) -> None:
    driver = made()
    driver.connect()
    until(driver, TURN, 0.035)
    assert driver.process._process is not None
    driver.process._process.kill()
    with pytest.raises(DriverError, match=r"process (died|is gone)"):
        wait_until(lambda: (driver.read(), driver.write(TURN, 0.035))[1])
    driver.recover()
    assert np.isfinite(driver.read().q).all()


@contextmanager
def device(folder: Path, **about: Any) -> Iterator[Any]:
    """LeRobot's teleoperator, which says what the file of `say` holds."""
    settings = {"file": str(folder / "action.json")}
    how = {"type": "stand_in_leader", "silence": 1.0, "settings": settings, **about}
    node = node_of("real_robot.teleop.lerobot_device.LeRobotDevice", **how)
    with closing(build(node, Device, clock=lambda: 0.0)) as made:
        yield made


def wait_for(made: Any, so: Any, tool: Any = None) -> Any:
    held: list[Any] = []
    wait_until(lambda: (held.append(made.read(tool)), so(held[-1]))[1])
    return held[-1]


def say(folder: Path, action: dict[str, float]) -> None:
    part = folder / "part"
    part.write_text(json.dumps(action))
    part.replace(folder / "action.json")


def test_a_teleoperator_of_motions(tmp_path: Path) -> None:
    def hand(x: float, z: float, grip: float) -> None:
        say(tmp_path, {"delta_x": x, "delta_z": z, "gripper": grip})

    hand(0.0, 0.0, 1.0)
    keys = {"dx": "delta_x", "dz": "delta_z"}
    with device(tmp_path, motions=keys, grip="gripper") as made:
        assert not made.read(None).touched
        hand(0.5, -1.0, 2.0)
        held = wait_for(made, lambda held: held.touched)
        assert held.motion == (0.5, 0.0, -1.0, 0.0, 0.0, 0.0) and held.grip == 1.0
        hand(0.0, 0.0, 0.0)
        assert wait_for(made, lambda held: held.grip == -1.0).touched
        hand(float("nan"), 0.0, 0.0)
        wait_for(made, lambda held: not held.touched)
    assert not made.read(None).touched, "one that is gone is not held"


def test_a_leader_arm_leads_the_tool(tmp_path: Path) -> None:
    at = {f"{name}.pos": 0.0 for name in JOINTS} | {"gripper.pos": 80.0}
    say(tmp_path, at)
    joints = [{"key": f"{name}.pos"} for name in JOINTS]
    reach = {"kinematics": "embodied.embodiments.so101.forward", "step": 0.02}
    tool = tuple(so101.forward(np.zeros((1, 5)))[0][0].tolist())
    with device(tmp_path, joints=joints, hand={"key": "gripper.pos"}, reach=reach) as made:
        wait_for(made, lambda held: not held.touched, tool)
        say(tmp_path, at | {"shoulder_pan.pos": 10.0})
        held = wait_for(made, lambda held: held.touched, tool)
    turned = np.array([[np.radians(10), 0, 0, 0, 0]])
    there = (so101.forward(turned)[0][0] - tool) / 0.02
    np.testing.assert_allclose(held.motion[:3], there, atol=1e-6)
    assert held.grip == 1.0


def test_a_teleoperator_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    say(tmp_path, {"delta_x": 0.0})
    for key, says in (("dz", "does not measure delta_z"), ("up", "there is no up")):
        with pytest.raises(ConfigError, match=says), device(tmp_path, motions={key: "delta_z"}):
            pass
