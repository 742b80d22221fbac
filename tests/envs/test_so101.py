"""The small servo arm's world: limits, goals, servos of many strengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.embodiments import so101
from embodied.envs.so101 import NEAR, RANGES, Config, So101
from embodied.evaluation.evaluate import evaluate
from embodied.policies.scripted.fr3 import Config as ScriptConfig
from embodied.policies.scripted.fr3 import Scripted


def test_a_script_reaches_the_goals() -> None:
    """In the arm's own kinematics, with servos half and twice as stiff as the model's."""
    env = So101(Config(num_envs=64))
    script = Scripted(ScriptConfig(task="reach", quality=1.0, step=0.015, sides=0), env.spec)
    won = evaluate(script, env, 64, seed=0).success
    assert won is not None and won.float().mean() > 0.9


def test_joints_turn_as_far_as_the_arms() -> None:
    model = So101(Config(num_envs=1)).model
    assert model.jnt_range[:5] == pytest.approx(np.stack([so101.LOWER, so101.UPPER], 1))


def test_success_is_the_tool_at_the_goal() -> None:
    env = So101(Config(num_envs=2, reward="shaped"))
    env.reset(0)
    tool = so101.forward(env.batch.qpos[:, :5])[0]
    low, high = np.array(list(RANGES.values())).T
    tool[:, 0] += [0.5 * NEAR, 2 * NEAR]
    goals = np.concatenate([tool, np.ones((2, 1))], 1)
    env.task[:] = (goals - low) / (high - low)
    outcome = env.outcome(np.zeros((2, 4)))
    assert outcome.terminated.tolist() == [True, False]
    assert outcome.reward == pytest.approx([1.0, 0.1 * (1 - np.tanh(0.3))])


def test_a_stiffer_servo_follows_sooner() -> None:
    env = So101(Config(num_envs=2))
    task = torch.full((2, 4), 0.5)
    task[:, 3] = torch.tensor([0.0, 1.0])
    obs = env.reset(0, task=task)
    env.batch.qpos[1] = env.batch.qpos[0]
    env.batch.ctrl[:, :5] = env.batch.qpos[:, :5] + 0.1
    env.batch.step(nstep=4)
    moved = env.batch.qpos[:, 0] - float(obs["state"][0, 0])
    assert 0 < 1.5 * moved[0] < moved[1]


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match=r"unknown parameter 'goal' \(did you mean"):
        Config(ranges={"goal": (0, 1)})
    with pytest.raises(ConfigError, match=r"must be \[low, high\]"):
        Config(ranges={"goal_x": (0.3, 0.2)})
