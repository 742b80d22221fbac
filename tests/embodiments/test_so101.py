"""The small servo arm: our kinematics against MuJoCo's, and its controller."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
import torch

from embodied.embodiments import so101
from embodied.embodiments.so101_delta import Config, So101Delta


def test_by_hand() -> None:
    """At zero: upper arm upright, forearm and hand forwards. A quarter turn of the pan: to the
    left. A quarter turn of the wrist: the hand points down."""
    place, pitch, _ = so101.forward(np.zeros((1, 5)))
    assert place[0] == pytest.approx([0.03 + 0.135 + 0.155, 0.0, 0.11 + 0.116])
    assert pitch[0] == 0
    q = np.array([[np.pi / 2, 0.0, 0.0, np.pi / 2, 0.4]])
    place, pitch, _ = so101.forward(q)
    assert place[0] == pytest.approx([0.0, 0.03 + 0.135, 0.11 + 0.116 - 0.155])
    assert pitch[0] == pytest.approx(np.pi / 2)


def test_place_and_jacobian_are_mujocos() -> None:
    model = mujoco.MjModel.from_xml_string(so101.mjcf())
    data = mujoco.MjData(model)
    random = np.random.default_rng(0)
    for q in random.uniform(so101.LOWER, so101.UPPER, (20, 5)):
        data.qpos[:5] = q
        mujoco.mj_forward(model, data)
        place, _, jacobian = so101.forward(q[None])
        assert place[0] == pytest.approx(data.site("tool").xpos, abs=1e-9)
        theirs = np.zeros((3, model.nv))
        mujoco.mj_jacSite(model, data, theirs, None, data.site("tool").id)
        assert jacobian[0, :3] == pytest.approx(theirs[:, :5], abs=1e-9)


def test_numpy_and_torch_are_one() -> None:
    q = np.random.default_rng(1).uniform(so101.LOWER, so101.UPPER, (4, 5))
    action = np.random.default_rng(2).uniform(-1, 1, (4, 4))
    arm = So101Delta(Config())
    joints, width, _ = arm(action, q, arm.begin(q, np.full(4, 0.02)))
    tensor = torch.as_tensor(q)
    there = arm.begin(tensor, torch.full((4,), 0.02, dtype=torch.float64))
    same, wide, _ = arm(torch.as_tensor(action), tensor, there)
    assert same.numpy() == pytest.approx(joints, abs=1e-12)
    assert wide.numpy() == pytest.approx(width)


def test_it_reaches_within_its_speed_and_keeps_its_pitch() -> None:
    config = Config()
    arm = So101Delta(config)
    q, goal = so101.HOME[None], np.array([[0.26, 0.10, 0.10]])
    reference = arm.begin(q, np.zeros(1))
    pitch = so101.forward(q)[1]
    for _ in range(60):
        ahead = goal - reference["place"]
        action = np.concatenate([np.clip(ahead / config.step, -1, 1), [[1.0]]], 1)
        joints, width, reference = arm(action, q, reference)
        most = config.speed * so101.VELOCITY * config.dt
        assert np.abs(joints - q).max() <= most + 1e-12
        q = joints
    assert so101.forward(q)[0] == pytest.approx(goal, abs=1e-3)
    assert so101.forward(q)[1] == pytest.approx(pitch, abs=1e-2)
    assert width[0] == pytest.approx(so101.OPEN)


def test_the_reference_stays_near_an_arm_that_is_held() -> None:
    arm = So101Delta(Config())
    q = so101.HOME[None]
    reference = arm.begin(q, np.zeros(1))
    for _ in range(50):
        _, _, reference = arm(np.array([[1.0, 0.0, 0.0, 0.0]]), q, reference)
    here = so101.forward(q)[0]
    assert np.linalg.norm(reference["place"] - here) <= arm.config.lead + 1e-9
