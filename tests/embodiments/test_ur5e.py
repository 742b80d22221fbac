"""The UR5e: its kinematics against poses known by hand and against themselves, its controller."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodied.embodiments import ur5e
from embodied.embodiments.fr3 import rotation_error
from embodied.embodiments.ur5e_delta import Config, Ur5eDelta


def test_by_hand() -> None:
    """At zero: both rods along -x, the wrist's links to -y and down. A quarter turn of the pan
    turns all of it. At home: the upper arm up, the forearm along -x, the flange down."""
    place, turn, _ = ur5e.forward(np.zeros((1, 6)))
    assert place[0] == pytest.approx([-0.425 - 0.3922, -0.1333 - 0.0996, 0.1625 - 0.0997])
    assert turn[0] == pytest.approx(np.array([[1, 0, 0], [0, 0, -1], [0, 1, 0]]), abs=1e-12)
    place, _, _ = ur5e.forward(np.array([[np.pi / 2, 0, 0, 0, 0, 0]]))
    assert place[0] == pytest.approx([0.1333 + 0.0996, -0.425 - 0.3922, 0.1625 - 0.0997])
    place, turn, _ = ur5e.forward(ur5e.HOME[None])
    assert place[0] == pytest.approx([-0.3922 - 0.0997, -0.1333, 0.1625 + 0.425 - 0.0996])
    assert turn[0, :, 2] == pytest.approx([0, 0, -1], abs=1e-12)


def test_the_jacobian_is_the_derivative() -> None:
    small = 1e-6
    for q in np.random.default_rng(0).uniform(ur5e.LOWER, ur5e.UPPER, (10, 6)):
        _, turn, jacobian = ur5e.forward(q[None])
        for joint in range(6):
            moved = q + small * np.eye(6)[joint]
            (ahead, turned, _), (back, _, _) = ur5e.forward(moved[None]), ur5e.forward(q[None])
            assert (ahead - back)[0] / small == pytest.approx(jacobian[0, :3, joint], abs=1e-5)
            spun = rotation_error(turned, turn)[0] / small
            assert spun == pytest.approx(jacobian[0, 3:, joint], abs=1e-5)


def test_numpy_and_torch_are_one() -> None:
    q = np.random.default_rng(1).uniform(-1, 1, (4, 6)) + ur5e.HOME
    action = np.random.default_rng(2).uniform(-1, 1, (4, 3))
    arm = Ur5eDelta(Config())
    joints, _, _ = arm(action, q, arm.begin(q, np.zeros(4)))
    tensor = torch.as_tensor(q)
    there = arm.begin(tensor, torch.zeros(4, dtype=torch.float64))
    same, _, _ = arm(torch.as_tensor(action), tensor, there)
    assert same.numpy() == pytest.approx(joints, abs=1e-12)


def test_it_reaches_within_its_speed_and_keeps_its_orientation() -> None:
    config = Config()
    arm = Ur5eDelta(config)
    q, goal = ur5e.HOME[None], np.array([[-0.55, 0.10, 0.35]])
    reference = arm.begin(q, np.zeros(1))
    turn = ur5e.forward(q)[1]
    for _ in range(60):
        action = np.clip((goal - reference["place"]) / config.step, -1, 1)
        joints, width, reference = arm(action, q, reference)
        assert np.abs(joints - q).max() <= config.speed * np.pi * config.dt + 1e-12
        q = joints
    assert ur5e.forward(q)[0] == pytest.approx(goal, abs=1e-3)
    assert np.abs(rotation_error(turn, ur5e.forward(q)[1])).max() < 1e-2
    assert width[0] == 0


def test_the_reference_stays_near_an_arm_that_is_held() -> None:
    arm = Ur5eDelta(Config())
    q = ur5e.HOME[None]
    reference = arm.begin(q, np.zeros(1))
    for _ in range(50):
        _, _, reference = arm(np.array([[-1.0, 0.0, 0.0]]), q, reference)
    away = np.linalg.norm(reference["place"] - ur5e.forward(q)[0])
    assert 0.02 < away <= arm.config.lead + 1e-9
