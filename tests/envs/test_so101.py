"""The small servo arm: goals, its cube, the scripts, and the way to the arm's driver."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.embodiments import so101
from embodied.envs.so101 import Config, Pick, PickConfig, So101, So101Pick, Touch
from embodied.evaluation.evaluate import evaluate
from embodied.policies.scripted.fr3 import Config as ReachScript
from embodied.policies.scripted.fr3 import Scripted
from embodied.policies.scripted.so101 import Config as ScriptConfig
from embodied.policies.scripted.so101 import ScriptedPick
from embodied.real_robot.drivers.driver import Driver
from tests.builders import make_policy
from tests.real_robot.test_deploy import robot as command
from tests.real_robot.test_deploy_policies import settings

CUBE = {"cube_x": 0.22, "cube_y": 0.05, "cube_z": 0.016, "cube_half": 0.016}
GIVEN = {**CUBE, "cube_cos_4yaw": 1.0, "cube_sin_4yaw": 0.0}
JOINTS = "robot.controller=joint_position"
CARTESIAN = PickConfig(num_envs=1, controller="cartesian_delta")


def set_cubes(env: So101Pick, place: np.ndarray) -> None:
    env.batch.qpos[:, 6:9] = place
    env.batch.qpos[:, 9:13] = [1, 0, 0, 0]


@pytest.mark.parametrize("picks", [True, False])
def test_a_script_picks_up_most_cubes_and_reaches_the_goals(picks: bool) -> None:
    """In the arm's own kinematics, with servos half and twice as stiff as the model's."""
    reach = ReachScript(task="reach", quality=1.0, step=0.015, sides=0)
    env = So101Pick(PickConfig(num_envs=48)) if picks else So101(Config(num_envs=64))
    script = ScriptedPick(ScriptConfig(), env.spec) if picks else Scripted(reach, env.spec)
    won = evaluate(script, env, env.num_envs, seed=0).success
    assert won is not None and won.float().mean() > (0.85 if picks else 0.9)


def test_success_is_a_cube_in_the_hand_and_high() -> None:
    """Not one in the air beside the hand, nor one in the hand at the table."""
    env = So101Pick(PickConfig(num_envs=3, reward="shaped"))
    env.reset(0)
    high = np.array([[0.2, 0.0, height] for height in (Pick.top + 0.03, Pick.top + 0.03, 0.03)])
    env.batch.qpos[:, :4] = so101.inverse(high, np.full(3, 1.0))
    env.batch.qpos[:, 4] = 0.0
    set_cubes(env, high + np.array([[0, 0.016, 0], [0, 0.1, 0], [0, 0.016, 0]]))
    outcome = env.outcome(np.zeros((3, 6)))
    assert outcome.terminated.tolist() == [True, False, False] and outcome.reward[0] == 1.0
    assert ((outcome.reward[1:] > 0) & (outcome.reward[1:] < 0.1)).all()


def test_a_cube_that_is_held_stays_in_the_hand() -> None:
    env = So101Pick(PickConfig(num_envs=4, ranges={"cube_yaw": (0, 0), "cube_y": (0, 0)}))
    env.reset(0)
    half = env.native(np.arange(4))["cube_half"]
    place = np.tile([0.2, 0.0, 0.05], (4, 1))
    q = np.concatenate([so101.inverse(place, np.full(4, 1.3)), np.zeros((4, 1))], 1)
    env.stand(np.arange(4), q, 2 * half - 0.003)
    set_cubes(env, place + np.stack([0 * half, half - 0.002, 0 * half], 1))
    action = (q - (so101.LOWER + so101.UPPER) / 2) / ((so101.UPPER - so101.LOWER) / 2)
    shut = torch.from_numpy(np.concatenate([action, -np.ones((4, 1))], 1)).float()
    for k in range(70):
        env.step(shut)
        if k == 20:  # it has turned with the hand, and the jaws are shut
            before = env.batch.qpos[:, 6:9].copy()
    moved = np.linalg.norm(env.batch.qpos[:, 6:9] - before, axis=1)
    assert (env.batch.qpos[:, 8] > 0.03).all() and moved.max() < 0.002


def test_the_inverse_kinematics_are_those_of_the_arm() -> None:
    random = np.random.default_rng(0)
    place = random.uniform([0.18, -0.1, 0.015], [0.26, 0.1, 0.06], (50, 3))
    pitch = random.uniform(1.1, 1.3, 50)
    q = np.concatenate([so101.inverse(place, pitch), np.zeros((50, 1))], 1)
    there, turned, _ = so101.forward(q)
    assert there == pytest.approx(place) and turned == pytest.approx(pitch)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: ScriptedPick(ScriptConfig(), So101Pick(CARTESIAN).spec),
            "controller=joint_position",
        ),
        (lambda: So101(Config(ranges={"goal": (0, 1)})), r"no parameter 'goal' \(did you mean"),
        (lambda: So101(Config(ranges={"goal_x": (0.3, 0.2)})), r"must be \[low, high\]"),
    ],
)
def test_mistakes_are_one_line(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_the_driver_of_the_arm_takes_what_a_policy_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the driver's own names; a policy sees and does the same there."""
    env = So101Pick(PickConfig(num_envs=1))
    outside = build(settings()["driver"], Driver).outside()
    assert outside is not None and env.spec.act.names == outside.names
    run = tmp_path / "run"
    policy = make_policy("gaussian.Gaussian", env.spec)
    checkpoint.save(run / "checkpoints" / "00000001", policy, 1)
    (run / "run.yaml").write_text("env: {_target_: embodied.envs.so101.So101Pick}\n")
    given = f"robot.given={json.dumps(GIVEN)}".replace('"', "").replace(" ", "")
    words = ("check", "robot=so101_sim", f"policy={run}", given)
    code, text = command(capsys, *words, JOINTS)
    assert code == 0 and "ok   parity" in text and "ok   actions" in text, text
    code, text = command(capsys, *words)
    assert code == 1 and "robot.controller=joint_position" in text, "it is not cartesian"


def test_success_is_the_tool_at_the_goal() -> None:
    env = So101(Config(num_envs=2, reward="shaped"))
    env.reset(0)
    tool = so101.forward(env.batch.qpos[:, :5])[0]
    low, high = np.array([(each.low, each.high) for each in Touch.parameters]).T
    tool[:, 0] += [0.5 * Touch.close, 2 * Touch.close]
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
