"""The FR3 between two walls, tick by tick: what presses, how hard, and what the springs do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.envs.fr3.contact_env import Config, Fr3Contact

pytest.importorskip("franky_sim", reason="franky-sim is not installed")


def turned_into_the_wall(stiffness: float) -> tuple[float, bool]:
    """The largest force (N) of an arm that turns about its base, and whether that violated."""
    env = Fr3Contact(Config(num_envs=4, push=0.0, threads=1))
    env.reset(0)
    action = torch.zeros(4, 8)
    action[:, 0], action[:, 7] = 0.3, stiffness
    logs = []
    for step in (env.step(action) for _ in range(100)):
        logs.append(step.log)
        assert torch.equal(step.log["violated"], step.log["force"] > 30.0)
        assert (step.terminated >= step.log["violated"]).all()
    force, violated = (torch.stack([log[name] for log in logs]) for name in ("force", "violated"))
    return float(force.max()), bool(violated.any())


def test_a_stiff_arm_presses_too_hard_and_a_soft_one_does_not() -> None:
    stiff, violated = turned_into_the_wall(1.0)
    soft, soft_violated = turned_into_the_wall(-1.0)
    assert stiff > 30.0 and violated
    assert 0.0 < soft < 30.0 and not soft_violated


def test_the_reflex_sees_what_the_chain_sees() -> None:
    """Position, velocity, torque, set-point minus position; the set-point's acceleration is that
    of the limits: 8 rad/s2 are 0.0032 rad in the first tick of 20 ms."""
    env = Fr3Contact(Config(num_envs=2, push=0.0, threads=1))
    env.reset(0)
    q = env.batch.qpos[:, :7].copy()
    action = torch.zeros(2, 8)
    action[:, 0], action[:, 7] = 1.0, 1.0
    step = env.step(action)
    joints = step.next_obs["joints"].numpy()
    np.testing.assert_allclose(joints[:, :7], env.batch.qpos[:, :7], atol=1e-6)
    np.testing.assert_allclose(joints[:, 7:14], env.batch.qvel[:, :7], atol=1e-5)
    ahead = joints[:, 21:] + joints[:, :7] - q
    np.testing.assert_allclose(ahead[:, 0], 0.0032, atol=1e-5)
    assert np.abs(ahead[:, 1:]).max() < 1e-5
    assert (joints[:, 14] > 0).all(), "the spring pulls the way the set-point went"


def test_a_push_moves_a_soft_arm_farther() -> None:
    moved = []
    for stiffness in (1.0, -1.0):
        env = Fr3Contact(Config(num_envs=1, push=20.0, threads=1))
        start = env.reset(0)["state"][:, 14:17].clone()
        action = torch.tensor([[0.0] * 7 + [stiffness]])
        places = [env.step(action).next_obs["state"][:, 14:17] for _ in range(150)]
        moved.append(float((torch.cat(places) - start).norm(dim=1).max()))
    assert moved[1] > 2 * moved[0] > 0.001


def test_a_task_without_touch_sensors_is_refused() -> None:
    with pytest.raises(ConfigError, match="reach has no touch sensors; use channel"):
        Fr3Contact(Config(task="reach"))
