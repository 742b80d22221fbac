"""Kinematics from a file: equal to MuJoCo's own on random poses, saved and read again, refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
import yaml

from embodied.core.build import ConfigError
from embodied.embodiments import fr3, so101, ur5e
from embodied.embodiments.arrays import Floats
from embodied.embodiments.kinematics import from_mujoco
from embodied.embodiments.kinematics.arm import load_arm, read_arm_file, write_arm_file
from embodied.embodiments.kinematics.chain import Chain, Frame, Joint
from embodied.embodiments.kinematics.from_mujoco import find_route, read_arm, read_joints, read_spec

ROOT = Path(__file__).resolve().parents[2]
TERN = ROOT / "docs" / "own_robot" / "tern.urdf"
# Turned and shifted base, joint anchors beside the body's origin, two joints in one body, a sliding
# joint, positions that do not begin at zero, a tip that is turned.
CROOKED = """
<mujoco><compiler angle="radian"/><worldbody>
  <body name="cart" pos="0.3 -0.2 0.1" euler="0.2 0.4 -0.3">
    <body name="one" pos="0.1 0 0.2" euler="0.3 0 0.1">
      <joint name="turn" axis="1 2 3" pos="0.05 0.02 -0.01" ref="0.3" range="-1 2"/>
      <joint name="also" axis="0 1 0" pos="-0.03 0 0.02" range="-1 1"/>
      <geom size="0.05"/>
      <body name="two" pos="0 0.1 0.1" euler="0 0.7 0">
        <joint name="slide" type="slide" axis="1 0 1" ref="0.1" range="0 0.4"/>
        <geom size="0.05"/>
        <body name="three" pos="0.2 0 0"><joint name="last" axis="0 0 -1" range="-2 2"/>
          <geom size="0.05"/><site name="tip" pos="0.1 0.03 0" euler="0.5 0.1 0"/>
        </body></body></body></body></worldbody></mujoco>
"""


def model_of(name: str) -> tuple[Any, dict[str, str | None]]:
    """A model, and its base and tip."""
    if name == "fr3":
        spec = mujoco.MjSpec.from_file(str(fr3.mjcf()))
        spec.meshdir = str(fr3.mjcf().parent / "meshes")
        return spec.compile(), {"base": None, "tip": "hand"}
    if name == "tern":
        return from_mujoco.compile_spec(read_spec(TERN), TERN), {"base": None, "tip": "tool"}
    text = {"so101": so101.mjcf(), "ur5e": ur5e.mjcf(), "crooked": CROOKED}[name]
    tips = {"so101": "tool", "ur5e": None, "crooked": "tip"}
    return mujoco.MjModel.from_xml_string(text), {"base": None, "tip": tips[name]}


def theirs(
    mj: Any, data: Any, route: from_mujoco.Route, q: Floats
) -> tuple[Floats, Floats, Floats]:
    """MuJoCo's own tip position, rotation and Jacobian in the frame of the base body."""
    data.qpos[mj.jnt_qposadr[list(route.joints)]] = q
    mujoco.mj_forward(mj, data)
    body = route.bodies[-1]
    place, turn = data.xpos[body], data.xmat[body]
    if route.site is not None:
        place, turn = data.site_xpos[route.site], data.site_xmat[route.site]
    base, origin = data.xmat[route.base].reshape(3, 3), data.xpos[route.base]
    linear, angular = np.zeros((3, mj.nv)), np.zeros((3, mj.nv))
    mujoco.mj_jac(mj, data, linear, angular, place, body)
    dofs = mj.jnt_dofadr[list(route.joints)]
    jacobian = np.concatenate([base.T @ linear[:, dofs], base.T @ angular[:, dofs]])
    return base.T @ (place - origin), base.T @ turn.reshape(3, 3), jacobian


@pytest.mark.parametrize("name", ["fr3", "so101", "ur5e", "tern", "crooked"])
def test_it_is_mujocos(name: str) -> None:
    mj, ends = model_of(name)
    route = find_route(mj, **ends)
    chain, data = Chain(*read_joints(mj, route)), mujoco.MjData(mj)
    q = np.random.default_rng(0).uniform(-2.5, 2.5, (50, len(chain)))
    for row, *found in zip(q, *chain(q), strict=True):
        for ours, known in zip(found, theirs(mj, data, route, row), strict=True):
            assert ours == pytest.approx(known, abs=1e-9)


def test_it_is_what_was_written_by_hand() -> None:
    """FR3 and UR5e have kinematics from data sheets; the SO-101 knows place and pitch."""
    random = np.random.default_rng(1)
    mj, ends = model_of("fr3")
    joints, hand = read_joints(mj, find_route(mj, **ends))
    for i, name in enumerate(fr3.JOINTS):
        assert mj.joint(name).range.tolist() == [fr3.LOWER[i], fr3.UPPER[i]]
        assert mj.jnt_actfrcrange[mj.joint(name).id, 1] == fr3.TORQUE[i]
    place = np.array(hand.place) + np.reshape(hand.turn, (3, 3)) @ [0, 0, fr3.TOOL]
    q = random.uniform(fr3.LOWER, fr3.UPPER, (20, 7))
    pairs = zip(Chain(joints, Frame(tuple(place), hand.turn))(q), fr3.forward(q), strict=True)
    assert all(np.abs(ours - known).max() < 1e-9 for ours, known in pairs)
    q = random.uniform(so101.LOWER, so101.UPPER, (20, 5))
    tool, turn, jacobian = load_arm("so101").forward(q)
    known, pitch, linear = so101.forward(q)
    assert np.abs(tool - known).max() < 1e-9
    assert np.abs(jacobian[:, :3] - linear[:, :3]).max() < 1e-9
    assert np.abs(np.arcsin(-turn[:, 2, 0]) - np.arcsin(np.sin(pitch))).max() < 1e-9


def test_numpy_and_torch_are_one_and_link_frames_are_right() -> None:
    mj, ends = model_of("crooked")
    chain = Chain(*read_joints(mj, find_route(mj, **ends)))
    q = np.random.default_rng(2).uniform(-1, 1, (4, 4))
    for ours, tensor in zip(chain(q), chain(torch.as_tensor(q)), strict=True):
        assert tensor.numpy() == pytest.approx(ours, abs=1e-12)
    turns, places = chain.frames(q)
    place = places[:, -1] + turns[:, -1] @ np.array(chain.tip.place)
    assert place == pytest.approx(chain(q)[0])


def test_a_saved_arm_is_the_same_arm(tmp_path: Path) -> None:
    mj, ends = model_of("tern")
    hand = from_mujoco.read_hand(TERN, mj, ["left_finger", "right_finger"], None)
    made = read_arm(TERN, mj, find_route(mj, **ends), hand=hand)
    write_arm_file(made, tmp_path / "tern.yaml")
    again = read_arm_file(str(tmp_path / "tern.yaml"))
    assert again == made and again.limits.velocity == (2.0, 2.0, 2.5, 3.0, 3.0, 4.0)
    assert made.limits.effort == (30.0, 30.0, 20.0, 8.0, 8.0, 5.0)
    assert made.hand is not None and made.hand.open == pytest.approx(0.06)
    arm = load_arm(str(tmp_path / "tern.yaml"))
    q = np.random.default_rng(3).uniform(arm.lower, arm.upper, (4, 6))
    assert np.array_equal(arm.forward(q)[0], Chain(made.joints, made.tool)(q)[0])


def test_run_time_needs_neither_torch_nor_mujoco(tmp_path: Path) -> None:
    """What the control process imports for an arm file, and the controllers on it."""
    mj, ends = model_of("tern")
    write_arm_file(read_arm(TERN, mj, find_route(mj, **ends)), tmp_path / "tern.yaml")
    code = (
        "import sys, numpy as np\n"
        "from embodied.embodiments import cartesian_delta, fr3\n"
        "from embodied.embodiments.cartesian_pose import CartesianPose, Config\n"
        "from embodied.embodiments.joint_position import JointPosition\n"
        "from real_robot import assemble\n"
        f"arm = CartesianPose(Config(arm={str(tmp_path / 'tern.yaml')!r}))\n"
        "arm(np.zeros((1, 9)), np.zeros((1, 6)), arm.begin(np.zeros((1, 6)), np.zeros(1)))\n"
        "arm = cartesian_delta.CartesianDelta(cartesian_delta.Config(turning='full'))\n"
        "arm(np.zeros((1, 7)), fr3.HOME[None], arm.begin(fr3.HOME[None], np.zeros(1)))\n"
        "assert not {'torch', 'mujoco'} & set(sys.modules), sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


LINK = (
    '<link name="{}"><inertial><mass value="1"/><inertia ixx="1" iyy="1" izz="1" ixy="0" ixz="0" '
    'iyz="0"/></inertial></link>'
)
JOINT = (
    '<joint name="{0}" type="{1}"><parent link="{2}"/><child link="{0}_link"/><axis xyz="0 1 0"/>'
    '<limit lower="0" upper="{3}" effort="9" velocity="1"/>{4}</joint>'
)


def coupled(path: Path, arm: str = "", finger: str = "") -> Path:
    """A URDF of two turning joints and two sliding fingers, with couplings."""
    joints = [
        ("shoulder", "revolute", "base", "1.5", ""),
        ("elbow", "revolute", "shoulder_link", "1.5", arm),
        ("left", "prismatic", "elbow_link", "0.04", ""),
        ("right", "prismatic", "elbow_link", "0.04", finger),
    ]
    links = [LINK.format(name) for name in ("base", *(f"{each[0]}_link" for each in joints))]
    body = "".join([*links, *(JOINT.format(*each) for each in joints)])
    path.write_text(f'<robot name="r">{body}</robot>')
    return path


MJCF = """
<mujoco><worldbody><body name="shoulder_link"><joint name="shoulder" range="0 1.5"/>
  <geom size="0.1"/><body name="elbow_link"><joint name="elbow" range="0 1.5"/><geom size="0.1"/>
    <body><joint name="left" type="slide" range="0 0.04"/><geom size="0.1"/></body>
    <body><joint name="right" type="slide" range="0 0.04"/><geom size="0.1"/></body>
  </body></body></worldbody>
  <equality><joint joint1="{}" joint2="{}"/></equality></mujoco>"""


@pytest.mark.parametrize("kind", ["urdf", "xml"])
def test_coupled_joints_are_a_hand_and_no_arm(kind: str, tmp_path: Path) -> None:
    """MuJoCo drops `mimic` in silence; an MJCF has equalities of joints."""
    path = tmp_path / f"a.{kind}"
    if kind == "urdf":
        coupled(path, finger='<mimic joint="left" multiplier="1"/>')
    else:
        path.write_text(MJCF.format("right", "left"))
    mj = from_mujoco.compile_spec(read_spec(path), path)
    one, both = (
        from_mujoco.read_hand(path, mj, names, None) for names in (["left"], ["left", "right"])
    )
    assert one == both and one.open == pytest.approx(0.08) and one.joints == ("left", "right")
    assert len(read_arm(path, mj, find_route(mj, tip="elbow_link"), velocity=[1.0]).joints) == 2
    path = tmp_path / f"b.{kind}"
    if kind == "urdf":
        coupled(path, arm='<mimic joint="shoulder" multiplier="-1"/>')
    else:
        path.write_text(MJCF.format("elbow", "shoulder"))
    mj = from_mujoco.compile_spec(read_spec(path), path)
    line = rf"joint elbow is coupled to shoulder in b\.{kind}, and .* end the chain before it, tip="
    with pytest.raises(ConfigError, match=line):
        read_arm(path, mj, find_route(mj, tip="elbow_link"))
    shorter = find_route(mj, tip="shoulder_link")
    assert len(read_arm(path, mj, shorter, velocity=[1.0]).joints) == 1


def test_base_and_tip_are_a_choice() -> None:
    mj, _ = model_of("tern")
    part = find_route(mj, base="upper_arm", tip="wrist_2")
    names = [joint.name for joint in read_joints(mj, part)[0]]
    assert names == ["elbow", "forearm_roll", "wrist_pitch"]
    for ends, match in (
        ({}, r"tip=NAME.*left_finger"),
        ({"tip": "tol"}, "did you mean"),
        ({"base": "left_finger", "tip": "tool"}, "is not above the tip"),
        ({"base": "palm", "tip": "tool"}, "no joint between"),
    ):
        with pytest.raises(ConfigError, match=match):
            find_route(mj, **ends)


def test_what_is_missing_is_said_in_one_line(tmp_path: Path) -> None:
    path, broken = tmp_path / "a.xml", tmp_path / "c.urdf"
    path.write_text(CROOKED)
    broken.write_text("<robot name='c'><link/></robot>")
    mj = from_mujoco.compile_spec(read_spec(path), path)
    made = read_arm(path, mj, find_route(mj), velocity=[1.0])
    assert made.home == (0.0, 0.0, 0.0, 0.0) and made.base == "cart" and made.tip == "tip"
    body = "<body name='b'><freejoint name='f'/><geom size='1'/></body>"
    free = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{body}</worldbody></mujoco>")
    for act, says in (
        (lambda: read_arm(path, mj, find_route(mj)), "how fast turn may turn; add velocity="),
        (
            lambda: read_arm(path, mj, find_route(mj), velocity=[1.0, 2.0]),
            "one for each of 4 joints",
        ),
        (lambda: read_spec(tmp_path / "b.urdf"), "is not there; name an MJCF"),
        (lambda: read_spec(broken), r"c\.urdf"),
        (lambda: read_joints(free, find_route(free)), "neither turns about an axis nor slides"),
    ):
        with pytest.raises(ConfigError, match=says):
            act()


def test_bad_arm_files(tmp_path: Path) -> None:
    good = yaml.safe_load((ROOT / "embodied" / "embodiments" / "so101_arm.yaml").read_text())
    for change, says in (
        ({"format": "embodied-arm-9"}, "write it again with embodied robot describe"),
        ({"home": [9.0] * 5}, "home between them"),
        ({"limits": {**good["limits"], "low": [0.0]}}, "5 finite numbers"),
        ({"jonits": []}, "did you mean"),
    ):
        file = tmp_path / "arm.yaml"
        file.write_text(yaml.safe_dump({**good, **change}))
        with pytest.raises(ConfigError, match=says):
            load_arm(str(file))
    with pytest.raises(ConfigError, match="known are fr3, so101, ur5e"):
        load_arm("xarm7")
    eye = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    joint = Joint("a", -1, (0.0, 0.0, 0.0), eye, (0.0, 0.0, 1.0))
    with pytest.raises(ConfigError, match="no serial arm"):
        Chain((joint, joint), Frame((0.0, 0.0, 0.0), eye))
