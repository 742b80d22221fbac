"""The same action space in simulation and on the robot: equal targets and observations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from embodied.core.build import ConfigError, build
from embodied.core.spec import Leaf, Spec
from embodied.embodiments.controller import Controller
from embodied.embodiments.named_controllers import NAMES
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.envs.mujoco.batch_env import MujocoVecEnv
from embodied.envs.so101 import Config as So101Config
from embodied.envs.so101 import So101
from embodied.real_robot.assemble import tool_target
from embodied.real_robot.control.chunk_follower import Chunk, ChunkFollower
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.policy.observer import observer, require_actions

ROBOTS = Path(__file__).resolve().parents[2] / "configs" / "robot"


def deployment(robot: str, controller: Any, **settings: Any) -> Deployment:
    node = yaml.safe_load((ROBOTS / f"{robot}.yaml").read_text())
    del node["_target_"]
    return Deployment.parse({**node, "policy": "", "controller": controller, **settings})


def environment(robot: str, controller: str) -> MujocoVecEnv:
    if robot == "so101_sim":
        return So101(So101Config(num_envs=1, controller=controller))
    return Fr3(Fr3Config(task="reach", num_envs=1, controller=controller))


@pytest.mark.parametrize("controller", NAMES)
@pytest.mark.parametrize("robot", ["sim", "so101_sim"])
def test_parity(robot: str, controller: str) -> None:
    """Thirty random actions: joint targets and hand to 1e-9, what a policy sees to 1e-6."""
    env = environment(robot, controller)
    obs = env.reset(0)["state"][0]
    names = env.spec.obs["state"].names
    shown = {n: float(v) for n, v in zip(names, obs, strict=True)}
    goal = {n: shown[n] for n in ("goal_x", "goal_y", "goal_z")}
    made = deployment(robot, controller, given=goal)
    require_actions(env.spec, made)
    n, seen, target = made.joints, observer(env.spec, made), tool_target(made)
    follower = ChunkFollower(build(made.controller, Controller), made.step)
    q, width = env.batch.qpos[0, :n].copy(), float(env.memory["width"][0])
    follower.begin(q, width, 0.0)
    random, out = np.random.default_rng(0), np.zeros(n)
    for k in range(30):
        action = random.uniform(-1, 1, (1, len(env.spec.act.names))).astype(np.float32)
        follower.take(Chunk(action.astype(float), k * made.step, k * made.step))
        follower.previous = None  # one step is one chunk here: nothing is blended
        follower(env.batch.qpos[0, :n].copy(), (k + 0.01) * made.step, out)
        step = env.step(torch.from_numpy(action))
        if bool(step.terminated[0]):
            break
        assert follower.step_end == pytest.approx(env.batch.ctrl[0, :n], abs=1e-9)
        hand = env.batch.ctrl[0, n] * (2 if robot == "sim" else 1)
        assert follower.width == pytest.approx(hand, abs=1e-9)
        there = step.next_obs["state"][0]
        q, dq = env.batch.qpos[0, :n], env.batch.qvel[0, :n]
        open_by = dict(zip(names, there.tolist(), strict=True))["width"]
        here = seen(q, dq, target(follower.step_end), open_by)["state"]
        if controller != "cartesian_delta":  # its reference is ahead of what the joints reach
            assert here == pytest.approx(there.numpy(), abs=1e-6)
    assert k >= 10


def spec(low: Any, high: Any, names: tuple[str, ...] = ()) -> Spec:
    obs = {"state": Leaf((1,), names=("q1",))}
    return Spec(obs, Leaf((6,), low=low, high=high, names=names), dt=0.05)


def test_units_that_do_not_match_are_refused_in_one_line() -> None:
    normal = deployment("so101_sim", "joint_position")
    node = dict(normal.controller) | {"action": "deg", "hand_values": [0.0, 100.0]}
    degrees = deployment("so101_sim", node)
    require_actions(spec(-1.0, 1.0), normal)
    require_actions(spec((-1.0,) * 6, (1.0,) * 6), normal)
    require_actions(spec(-180.0, 180.0), degrees)
    require_actions(spec(None, None), degrees)
    with pytest.raises(ConfigError, match=r"controller\.action=deg"):
        require_actions(spec(-180.0, 180.0), normal)
    with pytest.raises(ConfigError, match=r"controller\.action=normalized"):
        require_actions(spec(-1.0, 1.0), degrees)
    with pytest.raises(ConfigError, match=r"robot\.controller=joint_position"):
        require_actions(spec(-1.0, 1.0, tuple("abcdef")), normal)


def test_the_yaml_takes_the_name_of_a_controller() -> None:
    made = deployment("sim", "joint_position", step=0.1)
    assert made.controller["arm"] == "fr3" and made.controller["dt"] == 0.1
    with pytest.raises(ConfigError, match="did you mean"):
        deployment("sim", "joint_pos")
