"""The arms: kinematics by hand, delta controllers, joint positions and poses as actions."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.embodiments import cartesian_delta, fr3, so101, ur5e
from embodied.embodiments.arrays import Floats
from embodied.embodiments.cartesian_delta import CartesianDelta, Config
from embodied.embodiments.cartesian_pose import CartesianPose, rotation_vector
from embodied.embodiments.cartesian_pose import Config as PoseConfig
from embodied.embodiments.controller import Controller
from embodied.embodiments.fr3 import rotation, rotation_error
from embodied.embodiments.joint_position import Config as JointConfig
from embodied.embodiments.joint_position import JointPosition
from embodied.embodiments.named_controllers import NAMES, controller_node


def somewhere(arm: Any, count: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(arm.LOWER, arm.UPPER, (count, len(arm.JOINTS)))


def at_work(count: int) -> np.ndarray:
    place = np.random.default_rng(1).uniform([0.4, -0.2, 0.1], [0.6, 0.2, 0.3], (count, 3))
    return CartesianDelta(Config()).reach(place)


def test_the_ur5e_by_hand() -> None:
    """At zero: both rods along -x, the wrist's links to -y and down. A quarter turn of the pan
    turns all of it. At home: the upper arm up, the forearm along -x, the flange down."""
    place, turn, _ = ur5e.forward(np.stack([np.zeros(6), [np.pi / 2, 0, 0, 0, 0, 0], ur5e.HOME]))
    assert place[0] == pytest.approx([-0.425 - 0.3922, -0.1333 - 0.0996, 0.1625 - 0.0997])
    assert turn[0] == pytest.approx(np.array([[1, 0, 0], [0, 0, -1], [0, 1, 0]]), abs=1e-12)
    assert place[1] == pytest.approx([0.1333 + 0.0996, -0.425 - 0.3922, 0.1625 - 0.0997])
    assert place[2] == pytest.approx([-0.3922 - 0.0997, -0.1333, 0.1625 + 0.425 - 0.0996])
    assert turn[2, :, 2] == pytest.approx([0, 0, -1], abs=1e-12)


def test_the_ur5es_jacobian_is_the_derivative() -> None:
    q, small = somewhere(ur5e, 10), 1e-6
    back, turn, jacobian = ur5e.forward(q)
    for joint in range(6):
        ahead, turned, _ = ur5e.forward(q + small * np.eye(6)[joint])
        found = np.concatenate([ahead - back, rotation_error(turned, turn)], 1) / small
        assert found == pytest.approx(jacobian[:, :, joint], abs=1e-5)


def test_rotation_vector_and_error_are_inverse() -> None:
    vector = np.random.default_rng(2).uniform(-1.5, 1.5, (20, 3))
    vector[0] = 0.0
    turn = fr3.rotation(vector)
    np.testing.assert_allclose(turn @ turn.mT, np.tile(np.eye(3), (20, 1, 1)), atol=1e-12)
    start = fr3.forward(somewhere(fr3, 20))[1]
    np.testing.assert_allclose(rotation_error(turn @ start, start), vector, atol=1e-9)


def test_action_moves_the_tool_by_the_step() -> None:
    controller, q = CartesianDelta(Config(step=0.01)), at_work(8)
    reference = controller.begin(q, np.full(8, 0.08))
    joints, width, moved = controller(np.tile([1.0, -0.5, 0.25, 1.0], (8, 1)), q, reference)
    away = moved["place"] - reference["place"]
    assert away == pytest.approx(np.tile([0.01, -0.005, 0.0025], (8, 1)), abs=1e-12)
    # Two damped steps leave a little over; the direction has to be right.
    np.testing.assert_allclose(fr3.forward(joints)[0], moved["place"], atol=5e-4)
    np.testing.assert_allclose(width, 0.08)


def test_reference_stays_near_the_tool_in_the_box_and_slow() -> None:
    config = Config()
    controller, q = CartesianDelta(config), at_work(4)
    reference, stuck = controller.begin(q, np.full(4, 0.08)), fr3.forward(q)[0]
    for _ in range(60):
        before = reference["q"]
        joints, width, reference = controller(np.tile([1.0, 0.0, 0.0, -1.0], (4, 1)), q, reference)
        assert (np.abs(joints - before) <= config.speed * fr3.VELOCITY * config.dt + 1e-12).all()
        ahead = np.linalg.norm(reference["place"] - stuck, axis=1)
        assert (ahead <= config.lead + 1e-12).all()
    np.testing.assert_allclose(width, 0.0)
    for _ in range(60):
        q, _, reference = controller(np.tile([0.0, 0.0, -1.0, -1.0], (4, 1)), q, reference)
    np.testing.assert_allclose(reference["place"][:, 2], config.low[2], atol=1e-9)


@pytest.mark.parametrize(("turning", "vector"), [("yaw", [0, 0, 0.08]), ("full", [0.08, 0, 0])])
def test_turning(turning: Literal["yaw", "full"], vector: list[float]) -> None:
    controller, q = CartesianDelta(Config(turning=turning)), at_work(2)
    reference = controller.begin(q, np.zeros(2))
    action = np.zeros((2, len(controller.names)))
    action[:, 3] = 1.0
    joints, _, moved = controller(action, q, reference)
    for turn, slack in ((moved["turn"], 1e-9), (fr3.forward(joints)[1], 5e-3)):
        found = rotation_error(turn, reference["turn"])
        np.testing.assert_allclose(found, [vector] * 2, atol=slack)


@pytest.mark.parametrize(
    ("arm", "controller", "goal"),
    [
        (so101, cartesian_delta.So101Delta(cartesian_delta.So101Config()), [0.26, 0.10, 0.10]),
        (ur5e, cartesian_delta.Ur5eDelta(cartesian_delta.Ur5eConfig()), [-0.55, 0.10, 0.35]),
    ],
)
def test_it_reaches_within_its_speed_and_keeps_its_turn(
    arm: Any, controller: cartesian_delta.So101Delta | cartesian_delta.Ur5eDelta, goal: list[float]
) -> None:
    config, q, hand = controller.config, arm.HOME[None], int(arm is so101)
    reference = controller.begin(q, np.zeros(1))
    for _ in range(60):
        ahead = np.clip((goal - reference["place"]) / config.step, -1, 1)
        action = np.concatenate([ahead, np.ones((1, hand))], 1)
        joints, width, reference = controller(action, q, reference)
        assert (np.abs(joints - q) <= config.speed * arm.VELOCITY * config.dt + 1e-12).all()
        q = joints
    assert arm.forward(q)[0][0] == pytest.approx(goal, abs=1e-3)
    apart = arm.forward(q)[1] - arm.forward(arm.HOME[None])[1]
    assert np.abs(apart).max() < 1e-2
    assert width[0] == pytest.approx(so101.OPEN if hand else 0.0)
    q = arm.HOME[None]
    reference = controller.begin(q, np.zeros(1))
    action[0] = [np.sign(goal[0]), *[0.0] * (len(controller.names) - 1)]
    for _ in range(50):  # of an arm that is held
        _, _, reference = controller(action, q, reference)
    away = np.linalg.norm(reference["place"] - arm.forward(q)[0])
    assert 0.02 < away <= config.lead + 1e-9


@pytest.mark.parametrize("turning", ["none", "yaw", "full"])
def test_controllers_agree_over_many_steps(turning: Literal["none", "yaw", "full"]) -> None:
    controller, random = CartesianDelta(Config(turning=turning)), np.random.default_rng(1)
    place = random.uniform([0.4, -0.2, 0.1], [0.6, 0.2, 0.3], (6, 3))
    q = controller.reach(place)
    np.testing.assert_allclose(q, controller.reach(torch.from_numpy(place)).numpy(), atol=1e-9)
    for one, other in zip(fr3.forward(q), fr3.forward(torch.from_numpy(q)), strict=True):
        np.testing.assert_allclose(one, other.numpy(), atol=1e-12)
    ours = controller.begin(q, np.full(6, 0.08))
    theirs = controller.begin(torch.from_numpy(q), torch.full((6,), 0.08, dtype=torch.float64))
    for _ in range(30):
        action = random.uniform(-1, 1, (6, len(controller.names)))
        q, width, ours = controller(action, q, ours)
        after = controller(torch.from_numpy(action), theirs["q"], theirs)
        np.testing.assert_allclose(q, after[0].numpy(), atol=1e-9)
        np.testing.assert_allclose(width, after[1].numpy(), atol=1e-12)
        theirs = after[2]


ARMS = {"fr3": fr3, "so101": so101, "ur5e": ur5e}


def settled(
    arm: Controller, action: Floats, q: Floats, steps: int
) -> tuple[Floats, Floats, list[float]]:
    """Joint targets and hand after so many steps of an arm that follows at once, and the largest
    motion of each step."""
    reference, moved = arm.begin(q, np.zeros(len(q))), []
    width = reference["width"]
    for _ in range(steps):
        joints, width, reference = arm(action, q, reference)
        moved.append(float(np.abs(joints - q).max()))
        q = joints
    return q, width, moved


@pytest.mark.parametrize("name", ARMS)
def test_minus_one_and_one_are_the_joint_limits(name: str) -> None:
    arm = JointPosition(JointConfig(arm=name))
    module, hand = ARMS[name], arm.arm.hand is not None
    assert arm.names[:2] == tuple(f"{joint}.pos" for joint in module.JOINTS[:2])
    assert (arm.names[-1] == "gripper.pos") is hand
    for value, limit in ((-1.0, module.LOWER), (1.0, module.UPPER)):
        q, width, _ = settled(arm, np.full((1, len(arm.names)), value), module.HOME[None], 200)
        assert q[0] == pytest.approx(limit, abs=1e-9)
        assert width[0] == pytest.approx(module.OPEN if hand and value > 0 else 0.0)


def test_a_jump_of_the_action_moves_no_faster_than_the_speed() -> None:
    """And a blocked arm is pulled by no more than `lead`."""
    slow, ahead = (JointPosition(JointConfig(**more)) for more in ({"speed": 0.5}, {"lead": 0.1}))
    _, _, moved = settled(slow, np.ones((1, 8)), fr3.HOME[None], 40)
    assert max(moved) == pytest.approx(0.5 * fr3.VELOCITY.max() * 0.05)
    q = fr3.HOME[None]
    reference = ahead.begin(q, np.zeros(1))
    for _ in range(40):
        joints, _, reference = ahead(np.ones((1, 8)), q, reference)
    assert np.abs(joints - q).max() == pytest.approx(0.1)


def test_joint_positions_in_degrees_of_a_dataset() -> None:
    """LeRobot counts an SO-101 in degrees, its gripper from 0 to 100; an action says where to go
    and is not scaled."""
    arm = JointPosition(JointConfig(arm="so101", action="deg", hand_values=(0.0, 100.0)))
    assert arm.physical and arm.names[-1] == "gripper.pos"
    action = np.array([[30.0, -20.0, 45.0, 10.0, -90.0, 50.0]])
    q, width, _ = settled(arm, action, so101.HOME[None], 200)
    assert q[0] == pytest.approx(np.deg2rad(action[0, :5]))
    assert width[0] == pytest.approx(so101.OPEN / 2)
    beyond, _, _ = settled(arm, np.full((1, 6), 1e6), so101.HOME[None], 400)
    assert beyond[0] == pytest.approx(so101.UPPER)
    # One joint that a dataset counts the other way round.
    low, high = (90.0, -100.0, -90.0, -90.0, -150.0), (-90.0, 90.0, 90.0, 90.0, 150.0)
    arm = JointPosition(JointConfig(arm="so101", low=low, high=high, degrees=True))
    q, _, _ = settled(arm, np.array([[-0.5, 0, 0, 0, 0, 0]], float), so101.HOME[None], 200)
    assert q[0] == pytest.approx(np.deg2rad([45.0, -5.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: JointPosition(JointConfig(low=(0.0, 1.0))), "low has 2 numbers, fr3 has 7 joints"),
        (lambda: JointConfig(action="deg", low=(0.0,) * 7), "action=normalized"),
        (lambda: JointConfig(hand_values=(0.0, 100.0)), "go with action=rad or action=deg"),
        (lambda: PoseConfig(low=(0.5, 0.0, 0.0), high=(0.4, 1.0, 1.0)), "low must be below high"),
        (lambda: controller_node("joint_positions", "fr3", 0.05), "did you mean"),
        (lambda: controller_node("cartesian_pose", "/mine/arm.yaml", 0.05), "box of your arm"),
        (lambda: JointPosition(JointConfig(arm="/nowhere/arm.yaml")), "embodied robot describe"),
    ],
)
def test_bad_settings_say_what_to_type(make, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


@pytest.mark.parametrize("rotation", ["6d", "vector"])
@pytest.mark.parametrize("name", ["fr3", "ur5e"])
def test_a_pose_that_can_be_reached_is_reached(name: str, rotation: str) -> None:
    box = {"low": [-1.0, -1.0, 0.0], "high": [1.0, 1.0, 1.2]}
    node = controller_node("cartesian_pose", name, 0.05) | {"rotation": rotation, **box}
    arm = build(node, CartesianPose)
    module, random = ARMS[name], np.random.default_rng(0)
    goals = module.HOME + random.uniform(-0.15, 0.15, (16, len(module.HOME)))
    place, turn, _ = module.forward(goals)
    action = np.concatenate([arm.encode(place, turn), np.zeros((16, int(name == "fr3")))], 1)
    assert np.abs(arm.turn(action, turn) - turn).max() < 1e-9
    q, _, _ = settled(arm, action, np.tile(module.HOME, (16, 1)), 80)
    there, facing, _ = module.forward(q)
    assert np.abs(there - place).max() < 1e-3
    assert np.abs(facing - turn).max() < 2e-3


def test_an_arm_of_five_joints_goes_to_the_place_and_turns_as_near_as_it_can() -> None:
    arm = build(controller_node("cartesian_pose", "so101", 0.05), CartesianPose)
    goal, turn = np.array([[0.25, 0.1, 0.12]]), arm.arm.forward(so101.HOME[None])[1]
    action = np.concatenate([arm.encode(goal, turn), [[0.0]]], 1)
    q, _, moved = settled(arm, action, so101.HOME[None], 120)
    assert arm.arm.forward(q)[0] == pytest.approx(goal, abs=5e-3)
    assert max(moved[-10:]) < 1e-3


def test_what_cannot_be_reached_is_stayed_near_without_a_jump() -> None:
    """Beyond its reach, above its stretched arm, inside its base, behind and below it: never faster
    than the speed, at rest in the end, and from there back again."""
    config = PoseConfig(low=(-2.0, -2.0, -1.0), high=(2.0, 2.0, 2.0))
    arm, home = CartesianPose(config), np.tile(fr3.HOME, (4, 1))
    goals = np.array([[1.5, 0, 0.5], [0, 0, 1.8], [0.02, 0, 0.3], [-1, -1, -0.5]])
    there = np.tile([0.5, 0.0, 0.3], (4, 1))
    place, turn, _ = fr3.forward(home)
    out, back = (
        np.concatenate([arm.encode(at, turn), np.zeros((4, 1))], 1) for at in (goals, there)
    )
    q, _, moved = settled(arm, out, home, 250)
    assert max(moved[-10:]) < 0.01
    before, after = (np.linalg.norm(at - goals, axis=1) for at in (place, fr3.forward(q)[0]))
    assert (after < before).all()
    q, _, returned = settled(arm, back, q, 250)
    assert fr3.forward(q)[0] == pytest.approx(there, abs=2e-3)
    assert max(moved + returned) <= config.speed * fr3.VELOCITY.max() * config.dt + 1e-9


@pytest.mark.parametrize("angle", [0.0, 1e-9, 0.3, 1.6, 3.0, np.pi - 1e-9, np.pi])
def test_rotation_vectors_up_to_half_a_turn(angle: float) -> None:
    axis = np.random.default_rng(0).normal(size=(64, 3))
    turn = rotation(angle * axis / np.linalg.norm(axis, axis=1, keepdims=True))
    assert rotation(rotation_vector(turn)) == pytest.approx(turn, abs=1e-7)


@pytest.mark.parametrize("columns", [[0.0] * 6, [1.0, 0, 0, 1.0, 0, 0], [1e-5, 0, 0, 0, 1.0, 0]])
def test_columns_that_say_no_rotation_keep_the_last_one(columns: list[float]) -> None:
    turn = fr3.forward(fr3.HOME[None])[1]
    action = np.array([[0.0] * 3 + columns + [0.0]])
    assert np.array_equal(CartesianPose(PoseConfig()).turn(action, turn), turn)


@pytest.mark.parametrize("controller", NAMES)
@pytest.mark.parametrize("name", ARMS)
def test_numpy_and_torch_are_one(name: str, controller: str) -> None:
    arm = build(controller_node(controller, name, 0.05), Controller)
    module, random = ARMS[name], np.random.default_rng(1)
    q = module.HOME + random.uniform(-0.2, 0.2, (4, len(module.HOME)))
    action, width = random.uniform(-1, 1, (4, len(arm.names))), np.full(4, 0.02)
    joints, wide, moved = arm(action, q, arm.begin(q, width))
    there = arm.begin(torch.as_tensor(q), torch.as_tensor(width))
    same, other, again = arm(torch.as_tensor(action), torch.as_tensor(q), there)
    assert same.numpy() == pytest.approx(joints, abs=1e-12)
    assert other.numpy() == pytest.approx(wide)
    assert again["place"].numpy() == pytest.approx(moved["place"], abs=1e-12)
