"""`embodied robot describe`, and the drivers for an arm of one's own."""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np
import pytest
import yaml

from embodied.cli import main
from embodied.core.build import ConfigError
from embodied.deploy.describe import Config, describe
from embodied.embodiments.kinematics.arm import ArmFile, load_arm, write_arm_file
from embodied.embodiments.kinematics.from_mujoco import compile_spec, read_spec
from embodied.real_robot.control.arm_state import Floats
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.driver import DriverError
from embodied.real_robot.drivers.joint_driver import JointDriver
from embodied.real_robot.drivers.mujoco_arm import Config as ArmConfig
from embodied.real_robot.drivers.mujoco_arm import MujocoArm
from embodied.real_robot.safety.capsules import Kinematics, read_model
from embodied.real_robot.safety.geometry import Config as GeometryConfig
from embodied.real_robot.safety.geometry import Geometry, Plane

ROOT = Path(__file__).resolve().parents[2]
TERN = ROOT / "docs" / "own_robot" / "tern.urdf"
SMALL = """
<robot name="small">
  <link name="world_frame"/>
  <joint name="fixed" type="fixed"><parent link="world_frame"/><child link="foot"/>
    <origin xyz="0.5 0.2 0.1" rpy="0 0 0.7"/></joint>
  <link name="foot"><collision><geometry><box size="0.1 0.1 0.02"/></geometry></collision></link>
  <joint name="lift" type="prismatic"><parent link="foot"/><child link="post"/>
    <origin xyz="0 0 0.05"/><axis xyz="0 0 1"/>
    <limit lower="0.05" upper="0.3" effort="50" velocity="0.2"/></joint>
  <link name="post"><inertial><mass value="1"/><inertia ixx="0.01" iyy="0.01" izz="0.01" ixy="0"
    ixz="0" iyz="0"/></inertial>
    <collision><geometry><cylinder radius="0.02" length="0.1"/></geometry></collision></link>
  <joint name="swing" type="continuous"><parent link="post"/><child link="bar"/>
    <origin xyz="0.05 0 0.1"/><axis xyz="0 0 1"/><limit effort="5" velocity="1"/></joint>
  <link name="bar"><inertial><mass value="1"/><inertia ixx="0.01" iyy="0.01" izz="0.01" ixy="0"
    ixz="0" iyz="0"/></inertial><collision><origin xyz="0.1 0 0"/>
    <geometry><box size="0.2 0.03 0.03"/></geometry></collision></link>
</robot>
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ArmFile]:
    file = tmp_path_factory.mktemp("small") / "small.urdf"
    file.write_text(SMALL)
    table = describe(file, Config(out="x.yaml", base="foot", poses=50))
    write_arm_file(table, file.with_suffix(".yaml"))
    return file, table


def test_capsules_are_in_the_frame_of_the_base_and_around_the_shapes(
    small: tuple[Path, ArmFile],
) -> None:
    """The foot stands turned beside the world's origin; capsules follow MuJoCo's geoms."""
    file, table = small
    assert [joint.name for joint in table.joints] == ["lift", "swing"]
    assert table.limits.low == (0.05, pytest.approx(-np.pi)) and table.limits.effort == (50.0, 5.0)
    assert table.home == (pytest.approx(0.175), 0.0)
    model = read_model(str(file.with_suffix(".yaml")))
    assert model.names == ("foot", "post", "bar")
    mj = compile_spec(read_spec(file), file)
    data, q = mujoco.MjData(mj), np.array([0.2, 0.9])
    data.qpos[:] = q
    mujoco.mj_forward(mj, data)
    foot = mj.body("foot").id
    base, origin = data.xmat[foot].reshape(3, 3), data.xpos[foot]
    kinematics = Kinematics(model)
    starts, ways = kinematics(q[None])[0]
    corners = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]) * 0.5
    g = int(np.flatnonzero(mj.geom_bodyid == mj.body("bar").id)[0])
    points = corners * (0.2, 0.03, 0.03) @ data.geom_xmat[g].reshape(3, 3).T + data.geom_xpos[g]
    points = (points - origin) @ base
    apart: list[Floats] = []
    for i in (i for i, b in enumerate(kinematics.bodies) if model.names[b] == "bar"):
        share = (points - starts[i]) @ ways[i] / max(float(ways[i] @ ways[i]), 1e-12)
        nearest = starts[i] + np.clip(share, 0, 1)[:, None] * ways[i]
        apart.append(np.linalg.norm(points - nearest, axis=1) - kinematics.radius[i])
    assert np.min(apart, axis=0).max() < 1e-4


def test_the_arm_file_is_the_geometry_of_the_safety_chain(small: tuple[Path, ArmFile]) -> None:
    config = GeometryConfig(str(small[0].with_suffix(".yaml")), planes=(Plane((0, -1, 0, -0.15)),))
    depths = Geometry(config, 2).depths(np.array([[0.1, 0.0], [0.1, np.pi / 2]]))
    assert depths[0] > 0 > depths[1], "the bar swings through the wall"


def test_the_command_writes_robots_that_parse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["robot", "describe", str(TERN), "out=mine/t.yaml", "capsules=false", "tip=tool"]
    more = ["robot=mine/robot/t_sim.yaml", "driver=my_lab.t.T", "hand=[left_finger,right_finger]"]
    with pytest.raises(SystemExit):
        main([*words, *more, "home=[0,-0.4,0.5,0,1.2,0]"])
    assert "0.236, 0.005, 0.184" in capsys.readouterr().out
    for name in ("t", "t_sim"):
        node = yaml.safe_load((tmp_path / "mine" / "robot" / f"{name}.yaml").read_text())
        node.pop("_target_")
        made = Deployment.parse({**node, "policy": ""})
        assert made.joints == 6 and made.home_width == pytest.approx(0.06)
        assert "&id" not in (tmp_path / "mine" / "robot" / f"{name}.yaml").read_text()
    assert load_arm(str(tmp_path / "mine" / "t.yaml")).hand is not None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["out=a.yaml"], "say which file"),
        ([str(TERN)], "say which file"),
        ([str(TERN), "out=a.yaml"], "name the tip of the arm: tip=NAME"),
        ([str(TERN), "out=a.yaml", "tip=tool", "hom=[0]"], "did you mean"),
        ([str(TERN), "out=a.yaml", "tip=tool", "driver=my.Arm"], "ends in _sim.yaml"),
        ([str(TERN), "out=a.yaml", "tip=tool", "hand=[elbow]"], "say how far it opens, open=0.08"),
        ([str(TERN), "out=a.yaml", "tip=tool", "home=[9,0,0,0,0,0]"], "home between them"),
        ([str(TERN), "out=a.txt", "tip=tool"], "should end in .yaml"),
        (["nowhere.urdf", "out=a.yaml"], "is not there"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["robot", "describe", *words])
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said
    assert not list(tmp_path.glob("*.yaml"))


class Two(JointDriver):
    joints = ("a", "b")

    def __init__(self) -> None:
        self.now, self.q, self.sent, self.fails = 0.0, [0.1, 0.2], [], ""
        self.clock = lambda: self.now

    def read_joints(self) -> tuple[list[float], float]:
        if self.fails:
            raise TimeoutError(self.fails)
        return self.q, 0.03

    def send_joints(self, q: np.ndarray, width: float) -> None:
        self.sent.append((list(q), width))


def test_two_methods_are_a_driver() -> None:
    arm = Two()
    with arm:
        assert arm.read().q.tolist() == [0.1, 0.2] and arm.width == 0.03
        for k in range(1, 20):
            arm.now, arm.q = k / 100, [0.1 + 0.5 * k / 100, 0.2]
            state = arm.read()
        assert state.t == pytest.approx(0.19) and state.dq == pytest.approx([0.5, 0.0], abs=1e-4)
        arm.write(np.array([0.3, 0.4]), 0.01)
        assert arm.sent[-1] == ([0.3, 0.4], 0.01)
    assert arm.sent[-1][0] == pytest.approx([0.195, 0.2]), "a stop holds where it was measured"


def test_a_lost_wire_and_a_wrong_count_are_faults() -> None:
    arm = Two()
    arm.connect()
    arm.fails = "no answer within 10 ms"
    with pytest.raises(DriverError, match="Two: no answer within 10 ms"):
        arm.read()
    arm.stop()  # never raises
    arm.fails, arm.q = "", [1.0]
    with pytest.raises(DriverError, match="1 positions for 2 joints"):
        arm.read()


def test_the_simulation_follows_and_its_hand_too(tmp_path: Path) -> None:
    hand = ("left_finger", "right_finger")
    table = describe(TERN, Config(out="x", tip="tool", hand=hand, capsules=False))
    write_arm_file(table, tmp_path / "t.yaml")
    now = [0.0]
    arm = MujocoArm(ArmConfig(str(TERN), str(tmp_path / "t.yaml")), lambda: now[0])
    with pytest.raises(DriverError, match="not connected"):
        arm.read()
    arm.connect()
    target = np.array([0.3, -0.4, 0.3, 0.2, 0.8, 0.5])
    for _ in range(150):
        now[0] += 0.01
        arm.read()
        arm.write(target, 0.045)
    assert arm.read().q == pytest.approx(target, abs=1e-3)
    assert arm.width == pytest.approx(0.045, abs=1e-3)
    assert np.abs(arm.read().tau).max() < 30.0
    with pytest.raises(ConfigError, match=r"driver\.start needs 6"):
        MujocoArm(ArmConfig(str(TERN), str(tmp_path / "t.yaml"), start=(0.0,)))
