"""The arms: kinematics by hand and against themselves, delta controllers, numpy and torch."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch

from embodied.embodiments import fr3, so101, ur5e
from embodied.embodiments.cartesian_delta import (
    CartesianDelta,
    Config,
    So101Config,
    So101Delta,
    Ur5eConfig,
    Ur5eDelta,
)
from embodied.embodiments.fr3 import rotation_error


def somewhere(arm: Any, count: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(arm.LOWER, arm.UPPER, (count, len(arm.JOINTS)))


def at_work(count: int) -> np.ndarray:
    place = np.random.default_rng(1).uniform([0.4, -0.2, 0.1], [0.6, 0.2, 0.3], (count, 3))
    return CartesianDelta(Config()).reach(place)


def test_the_so101_by_hand() -> None:
    """At zero: upper arm upright, forearm and hand forwards. A quarter turn of the pan: to the
    left. A quarter turn of the wrist: the hand points down."""
    q = np.array([[0.0] * 5, [np.pi / 2, 0.0, 0.0, np.pi / 2, 0.4]])
    place, pitch, _ = so101.forward(q)
    assert place[0] == pytest.approx([0.03 + 0.135 + 0.155, 0.0, 0.11 + 0.116])
    assert place[1] == pytest.approx([0.0, 0.03 + 0.135, 0.11 + 0.116 - 0.155])
    assert pitch == pytest.approx([0.0, np.pi / 2])


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
        (so101, So101Delta(So101Config()), [0.26, 0.10, 0.10]),
        (ur5e, Ur5eDelta(Ur5eConfig()), [-0.55, 0.10, 0.35]),
    ],
)
def test_it_reaches_within_its_speed_and_keeps_its_turn(
    arm: Any, controller: So101Delta | Ur5eDelta, goal: list[float]
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
