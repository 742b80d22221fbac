"""`embodied robot describe`, and the drivers for an arm of one's own."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import yaml

from embodied.core.build import ConfigError, parse
from embodied.deploy.describe import Config as Described
from embodied.deploy.describe import describe
from embodied.embodiments import fr3, so101, ur5e
from embodied.embodiments.kinematics.arm import ArmFile, load_arm, write_arm_file
from embodied.embodiments.kinematics.from_mujoco import compile_spec, read_spec
from embodied.real_robot.assemble import build_chain, build_regions, forward_kinematics
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.joint_driver import JointDriver
from embodied.real_robot.drivers.mujoco_arm import Config as ArmConfig
from embodied.real_robot.drivers.mujoco_arm import MujocoArm
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.chain import Chain
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.limiter import Limiter
from embodied.real_robot.safety import fit_capsules
from embodied.real_robot.safety.geometry import (
    Box,
    BoxDistances,
    Config,
    Geometry,
    Kinematics,
    Model,
    Mounted,
    Plane,
    SelfDistances,
    read_model,
)
from embodied.real_robot.safety.workspace import Config as Tool
from embodied.real_robot.safety.workspace import Workspace
from scripts.fit_capsules import compile_arm, write
from tests.builders import Clock, exit_of
from tests.real_robot.test_control import LIMITS

ROOT = Path(__file__).resolve().parents[2]
TERN = ROOT / "docs" / "own_robot" / "tern.urdf"
ROBOTS = ROOT / "configs" / "robot"
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
    table = describe(file, Described(out="x.yaml", base="foot", poses=50))
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
    corners = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]) * 0.5
    g = int(np.flatnonzero(mj.geom_bodyid == mj.body("bar").id)[0])
    points = corners * (0.2, 0.03, 0.03) @ data.geom_xmat[g].reshape(3, 3).T + data.geom_xpos[g]
    assert beyond((points - origin) @ base, axes(model, q)["bar"]) < 1e-4
    # The same file is the geometry of the safety chain.
    config = Config(str(file.with_suffix(".yaml")), planes=(Plane((0, -1, 0, -0.15)),))
    depths = Geometry(config, 2).depths(np.array([[0.1, 0.0], [0.1, np.pi / 2]]))
    assert depths[0] > 0 > depths[1], "the bar swings through the wall"


def deployment(file: Path) -> Deployment:
    """That of a robot's YAML, without a policy."""
    node = yaml.safe_load(file.read_text())
    node.pop("_target_")
    return Deployment.parse({**node, "policy": ""})


def test_the_command_writes_robots_that_parse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["robot", "describe", str(TERN), "out=mine/t.yaml", "capsules=false", "tip=tool"]
    more = ["robot=mine/robot/t_sim.yaml", "driver=my_lab.t.T", "hand=[left_finger,right_finger]"]
    exit_of(*words, *more, "home=[0,-0.4,0.5,0,1.2,0]")
    assert "0.236, 0.005, 0.184" in capsys.readouterr().out
    for name in ("t", "t_sim"):
        file = tmp_path / "mine" / "robot" / f"{name}.yaml"
        made = deployment(file)
        assert made.joints == 6 and made.home_width == pytest.approx(0.06)
        assert "&id" not in file.read_text()
    assert load_arm(str(tmp_path / "mine" / "t.yaml")).hand is not None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["out=a.yaml"], "say which file"),
        ([str(TERN)], "say which file"),
        ([str(TERN), "out=a.yaml"], "name the tip of the arm: tip=NAME"),
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
    exit_of("robot", "describe", *words)
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said
    assert not list(tmp_path.glob("*.yaml"))


class Two(JointDriver):
    joints = ("a", "b")

    def __init__(self) -> None:
        self.q, self.sent, self.fails = [0.1, 0.2], [], ""
        self.time = Clock(0.0)
        self.clock = self.time

    def read_joints(self) -> tuple[list[float], float]:
        if self.fails:
            raise TimeoutError(self.fails)
        return self.q, 0.03

    def send_joints(self, q: np.ndarray, width: float) -> None:
        self.sent.append((list(q), width))


def test_two_methods_are_a_driver() -> None:
    """A lost wire and a wrong count are faults."""
    arm = Two()
    with arm:
        assert arm.read().q.tolist() == [0.1, 0.2] and arm.width == 0.03
        for k in range(1, 20):
            arm.time.now, arm.q = k / 100, [0.1 + 0.5 * k / 100, 0.2]
            state = arm.read()
        assert state.t == pytest.approx(0.19) and state.dq == pytest.approx([0.5, 0.0], abs=1e-4)
        arm.write(np.array([0.3, 0.4]), 0.01)
        assert arm.sent[-1] == ([0.3, 0.4], 0.01)
    assert arm.sent[-1][0] == pytest.approx([0.195, 0.2]), "a stop holds where it was measured"
    arm.fails = "no answer within 10 ms"
    with pytest.raises(DriverError, match="Two: no answer within 10 ms"):
        arm.read()
    arm.stop()  # never raises
    arm.fails, arm.q = "", [1.0]
    with pytest.raises(DriverError, match="1 positions for 2 joints"):
        arm.read()


def test_the_simulation_follows_and_its_hand_too(tmp_path: Path) -> None:
    table = describe(TERN, Described(out="x", tip="tool", hand=FINGERS, capsules=False))
    write_arm_file(table, tmp_path / "t.yaml")
    config, clock = ArmConfig(str(TERN), str(tmp_path / "t.yaml")), Clock(3600.0)
    arm = MujocoArm(config, clock)
    with pytest.raises(DriverError, match="not connected"):
        arm.read()
    arm.connect()
    clock.now = 0.0  # a clock that goes back does not stop the simulation
    target = np.array([0.3, -0.4, 0.3, 0.2, 0.8, 0.5])
    for _ in range(150):
        clock.now += 0.01
        arm.read()
        arm.write(target, 0.045)
    assert arm.read().q == pytest.approx(target, abs=1e-3)
    assert arm.width == pytest.approx(0.045, abs=1e-3)
    assert np.abs(arm.read().tau).max() < 30.0
    arm.limit_hand(0.1, 12.0)
    assert (arm.model.actuator_forcerange[arm._grips, 1] == 12.0).all(), "of each finger"
    with pytest.raises(ConfigError, match=r"driver\.start needs 6"):
        MujocoArm(replace(config, start=(0.0,)))


ARMS = {"fr3": fr3, "so101": so101, "ur5e": ur5e}
FINGERS = ("left_finger", "right_finger")


def poses(name: str, count: int, seed: int = 0) -> Floats:
    low, high = np.maximum(ARMS[name].LOWER, -3), np.minimum(ARMS[name].UPPER, 3)
    return np.random.default_rng(seed).uniform(low, high, (count, len(low)))


def axes(model: Model, q: Floats) -> dict[str, list[tuple[Floats, Floats, float]]]:
    """Start, end and radius of every body's capsules at `q` [n]."""
    made = Kinematics(model)
    starts, ways = made(q[None])[0]
    found: dict[str, list[tuple[Floats, Floats, float]]] = {}
    for b, start, way, radius in zip(made.bodies, starts, ways, made.radius, strict=True):
        found.setdefault(model.names[b], []).append((start, start + way, float(radius)))
    return found


def beyond(points: Floats, capsules: list[tuple[Floats, Floats, float]]) -> float:
    """How far the worst of points [m, 3] is outside of all capsules, m."""
    away = []
    for start, end, radius in capsules:
        way = end - start
        share = np.clip((points - start) @ way / max(float(way @ way), 1e-12), 0, 1)
        away.append(np.linalg.norm(points - start - share[:, None] * way, axis=1) - radius)
    return float(np.min(away, axis=0).max())


@pytest.mark.parametrize("name", ARMS)
def test_capsules_hold_the_surfaces_of_their_links_in_every_pose(name: str) -> None:
    mj, random = compile_arm(name), np.random.default_rng(1)
    arm, model = fit_capsules.Arm(mj, len(ARMS[name].JOINTS)), read_model(name)
    for q in poses(name, 12):
        arm.place(q, float(random.uniform()))
        capsules = axes(model, q)
        for g in range(mj.ngeom):
            body = mj.body(mj.geom_bodyid[g]).name
            if not mj.geom_bodyid[g] or not arm._solid(g):
                continue
            corners = fit_capsules.shape(mj, g)
            if mj.geom_type[g] != int(mujoco.mjtGeom.mjGEOM_MESH):
                corners = 0.985 * corners  # polygons around round shapes
            weights = random.dirichlet([1, 1, 1], (3, len(corners)))
            points = np.concatenate([*np.einsum("smc,mcx->smx", weights, corners), *corners])
            points = points @ arm.data.geom_xmat[g].reshape(3, 3).T + arm.data.geom_xpos[g]
            assert beyond(points, capsules[body]) < 2e-4, (body, g)


def test_the_capsules_are_tight() -> None:
    """A hand's capsule does not hold the whole hand by being huge."""
    radii = [c.radius for body in read_model("fr3").bodies for c in body.capsules]
    assert len(radii) <= 18 and max(radii) < 0.11
    ends = [c.radius for c in read_model("fr3").bodies[-1].capsules]
    assert max(ends) < 0.025, "a finger over its whole stroke of 40 mm"


@pytest.mark.parametrize("name", ARMS)
def test_frames_are_those_of_mujoco_and_of_our_own_kinematics(name: str) -> None:
    mj, model = compile_arm(name), read_model(name)
    arm, kinematics = fit_capsules.Arm(mj, len(ARMS[name].JOINTS)), Kinematics(model)
    assert model.joints == tuple(arm.joints()), "made from this MJCF"
    tool = kinematics.point(lambda q: ARMS[name].forward(q)[0])
    assert tool is not None and kinematics.point(lambda q: q[:, :3]) is None, "fixed to the last"
    q = poses(name, 20, seed=2)
    np.testing.assert_allclose(tool(q), ARMS[name].forward(q)[0], atol=1e-6)
    frames = kinematics.frames(q)
    for k, j in itertools.product(range(len(q)), range(q.shape[1])):
        arm.place(q[k])
        turn, place = arm.frame(j)
        np.testing.assert_allclose(frames[j + 1, k, :3], np.c_[turn, place], atol=1e-6)


def test_clearances_of_capsules_are_those_of_mujoco() -> None:
    """mj_geomDistance between the same capsules, as an independent check."""
    model, q = read_model("fr3"), poses("fr3", 60, seed=3)
    kinematics = Kinematics(model)
    capsules = [c for body in model.bodies for c in body.capsules]
    scene = mujoco.MjSpec()
    for c in capsules:
        half = float(np.linalg.norm(np.subtract(c.end, c.start))) / 2
        body = scene.worldbody.add_body(mocap=True)
        body.add_geom(type=mujoco.mjtGeom.mjGEOM_CAPSULE, size=[c.radius, half, 0])
    mj: Any = scene.compile()
    data: Any = mujoco.MjData(mj)
    pairs = list(itertools.combinations(range(len(capsules)), 2))
    ours = SelfDistances(kinematics, pairs)(kinematics(q))
    for k, (starts, ways) in enumerate(kinematics(q)):
        data.mocap_pos[:] = starts + ways / 2
        for c, way in enumerate(ways):
            mujoco.mju_quatZ2Vec(data.mocap_quat[c], way)
        mujoco.mj_kinematics(mj, data)
        apart = np.array([mujoco.mj_geomDistance(mj, data, i, j, 5.0, None) for i, j in pairs])
        near = apart > -0.02  # deeper, MuJoCo measures how to part them, not how near axes are
        np.testing.assert_allclose(ours[k][near], apart[near], atol=2e-5)


def test_boxes_are_as_far_as_many_points_say() -> None:
    random = np.random.default_rng(5)
    boxes = (
        Box((0.3, -0.1, 0.2), (0.1, 0.2, 0.05), turn=(0.3, -0.7, 1.1)),
        Box((0.0, 0.0, 0.0), (0.3, 0.3, 0.3)),
    )
    made = BoxDistances(boxes)
    starts, ways = random.normal(0, 0.4, (4, 30, 3)), random.normal(0, 0.3, (4, 30, 3))
    ways[0, :5], ways[1, :5, 1:] = 0.0, 0.0  # points, and along an axis
    got = made(np.stack([starts, ways], 1))
    for b, box in enumerate(boxes):
        t = np.linspace(0, 1, 4001)[:, None, None, None]
        x = (starts + t * ways - box.center) @ made.turns[b]
        over = np.abs(x) - np.asarray(box.half)
        signed = np.linalg.norm(np.maximum(over, 0), axis=-1) + np.minimum(over.max(-1), 0)
        np.testing.assert_allclose(got[:, b], signed.min(0), atol=4e-4)
    assert (got < 0).sum() > 10 and (got > 0).sum() > 50
    thick = random.uniform(0, 0.05, (2, 30))
    least = made.least(np.stack([starts, ways], 1), thick, np.full(4, 9.0))
    np.testing.assert_allclose(least, (got - thick).min((1, 2)), atol=1e-9)
    assert made.least(np.stack([starts, ways], 1), thick, np.full(4, -9.0)).tolist() == [-9.0] * 4


def test_planes_keep_the_hand_up_and_let_the_fingers_touch() -> None:
    table = Plane((0.0, 0.0, 2.0, 0.2), exempt=FINGERS)  # z = 0.1; any length of the normal
    geometry = Geometry(Config("fr3", planes=(table,), self_collision=False, margin=0.0), 7)
    for q in poses("fr3", 30, seed=6):
        capsules = axes(geometry.model, q)
        for name in ("fr3_link0", *FINGERS):
            del capsules[name]
        moving = itertools.chain(*capsules.values())
        lowest = min(min(start[2], end[2]) - radius for start, end, radius in moving)
        assert geometry.depth(q[None]) == pytest.approx(lowest - 0.1)
        assert geometry.nearest(q)[1].endswith("plane 1")


class Past:
    """An arm at `q` whose tool may go by a post that its hand would hit."""

    def __init__(self, geometry: Geometry | None, q: Floats = fr3.HOME) -> None:
        place = fr3.forward(fr3.HOME[None])[0][0]
        box = Tool(tuple(place - 0.6), tuple(place + 0.6))
        workspace = Workspace(box, lambda q: fr3.forward(q)[0])
        stages = [workspace] if geometry is None else [workspace, geometry]
        self.chain = Chain(stages, Limiter(LIMITS, 0.01, [each.depths for each in stages]))
        self.arm = ArmState(q.copy(), np.zeros(7), np.zeros(7), 0.0)
        self.chain.begin(self.arm)

    def go(self, target: Floats, ticks: int) -> Floats:
        """What was sent [ticks, n], which the arm follows at once."""
        sent = []
        for _ in range(ticks):
            sent.append(self.chain(target, 0.0, self.arm, 0.0).copy())
            self.arm = ArmState(sent[-1], np.zeros(7), np.zeros(7), 0.0)
        return np.stack(sent)


def pan(angle: float) -> Floats:
    """At home, joint 1 turned by so much."""
    return fr3.HOME + angle * np.eye(7)[0]


def post() -> Geometry:
    """Where the hand comes by when joint 1 turns by +0.9, above the tool."""
    place = fr3.forward(pan(0.9)[None])[0][0]
    box = Box((place[0], place[1], place[2] + 0.2), (0.02, 0.02, 0.05))
    return Geometry(Config("fr3", boxes=(box,), margin=0.01), 7)


def test_links_and_hand_stay_out_of_a_box_that_the_tool_misses() -> None:
    """S-7: the workspace knew one point; the hand went through the post."""
    judge, made = post(), Past(post())
    before = Past(None).go(pan(1.3), 400)
    assert judge.depths(before).min() < -0.02, "the workspace alone lets it"
    sent = made.go(pan(1.3), 400)
    assert judge.depths(sent).min() > -2e-3 and made.chain.counts[1] > 50
    assert 0.2 < sent[-1][0] < 0.8 and made.chain.resting, "it stops before the post"
    back = made.go(fr3.HOME, 400)
    assert back[-1] == pytest.approx(fr3.HOME, abs=1e-6), "and may go back"
    judge = Geometry(Config("fr3"), 7)
    inward = np.array([0.0, -1.7, 0.0, -3.0, 0.0, 0.6, 0.785])
    assert judge.depth(inward[None]) < 0, "folded onto itself"
    assert judge.depths(Past(Geometry(Config("fr3"), 7)).go(inward, 600)).min() > -2e-3


def test_a_mounted_camera_is_part_of_the_arm() -> None:
    box = Box((0.62, 0.0, 0.6), (0.02, 0.3, 0.02))
    bare = Geometry(Config("fr3", boxes=(box,)), 7)
    camera = Mounted("hand", (0.05, 0.05, 0.12), (0.12, 0.12, 0.12), 0.03)
    more = Geometry(Config("fr3", boxes=(box,), mounted=(camera,)), 7)
    apart = bare.depths(poses("fr3", 500)) - more.depths(poses("fr3", 500))
    assert (apart >= 0).all() and apart.max() > 0.02


def test_an_arm_in_a_box_may_come_out_but_not_go_further_in() -> None:
    judge, made = post(), Past(post(), pan(0.8))
    depth = judge.depth(pan(0.8)[None])
    assert depth < -0.005
    assert judge.depths(made.go(pan(1.1), 100)).min() > depth - 1e-6
    out = judge.depths(made.go(fr3.HOME, 400))
    assert out[-1] > 0 and (np.diff(np.minimum(out, 0)) > -1e-6).all()


@pytest.mark.parametrize("name", ["sim", "franka_sim", "so101_sim", "ur_sim"])
def test_each_arm_has_geometry_and_its_home_is_free(name: str) -> None:
    made = deployment(ROBOTS / f"{name}.yaml")
    workspace, geometry = build_regions(made)
    assert isinstance(workspace, Workspace) and isinstance(geometry, Geometry)
    assert geometry.depth(np.asarray(made.home)[None]) > 0.005
    names = build_chain(made).names
    assert names.index("geometry") == names.index("workspace") + 1
    q = np.random.default_rng(0).uniform(made.limits.low, made.limits.high, (2000, made.joints))
    np.testing.assert_allclose(workspace.forward(q), forward_kinematics(made)(q), atol=1e-6)
    inside = workspace.depths(q) > 0
    assert (geometry.depths(q[inside]) > 0).mean() > 0.5, "most of the workspace is left"


@pytest.mark.parametrize("name", ["franka", "so101", "ur"])
def test_each_arm_to_be_filled_in_has_geometry(name: str) -> None:
    node = yaml.safe_load((ROBOTS / f"{name}.yaml").read_text())
    assert node["geometry"]["model"] in ARMS and node["geometry"]["planes"]


def test_an_mjcf_of_ones_own_is_fitted_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_capsules, "SLICES", 1)  # the small arm above is cut
    arm = tmp_path / "arm.xml"
    arm.write_text(
        '<mujoco><worldbody><geom type="plane" size="1 1 1"/><body name="low">'
        '<joint axis="0 0 1"/><geom type="box" size="0.02 0.02 0.2" pos="0 0 0.2"/>'
        '<body name="high" pos="0 0 0.4"><joint axis="0 1 0"/>'
        '<geom type="cylinder" size="0.03 0.1" pos="0.1 0 0"/><geom type="sphere" size="0.05"/>'
        '<body name="tip"><joint type="slide" axis="1 0 0" range="0 0.1"/>'
        '<geom type="sphere" size="0.02" pos="0.1 0 0.1"/></body></body></body>'
        "</worldbody></mujoco>"
    )
    made = fit_capsules.fit_model(compile_arm(str(arm)), poses=100)
    write(made, tmp_path / "arm.yaml", "arm.xml")
    assert read_model(str(tmp_path / "arm.yaml")) == made
    assert [body.joint for body in made.bodies] == [0, 1, 1] and len(made.joints) == 2
    tip = [(np.array(c.start), np.array(c.end), c.radius) for c in made.bodies[2].capsules]
    swept = np.array([[0.08, 0, 0.1], [0.22, 0, 0.1], [0.15, 0.02, 0.1]])
    assert beyond(swept, tip) < 1e-3, "through its range"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": "fr4"}, "known are fr3, so101, ur5e"),
        ({"model": "/nowhere/arm.yaml"}, "robot describe"),
        ({"model": "so101"}, "has 5 joints, the limits have 7"),
        ({"planes": ({"plane": [0, 0, 0, 1]},)}, "normal"),
        ({"planes": ({"plane": [0, 0, 1, 0], "exempt": ["left_fingr"]},)}, "left_finger"),
        ({"mounted": ({"body": "hnd", "start": (0,) * 3, "end": (1,) * 3, "radius": 1},)}, "hand"),
        ({"ignored": (("hand", "fr3_link9"),)}, "no body fr3_link9"),
        ({"self_collision": False}, "does nothing"),
    ],
)
def test_settings_that_are_wrong_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Geometry(parse(Config, {"model": "fr3"} | settings, "geometry"), 7)
