"""An arm as an environment: daemon, control process and simulated arm, stepped from here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.spec import require_same
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.emulators.process import SharedEmulator
from embodied.real_robot.kernel.messages import Mode
from embodied.real_robot.rl.robot_env import Config, RealEnv
from embodied.real_robot.rl.session import RobotSessionError
from tests.builders import make_policy, node_of, wait_until
from tests.tiers import only_all

PATIENT = 90.0  # s
WORLD = node_of("envs.fr3.env.Fr3", task="reach")
PUSH = torch.tensor([[0.0, 1.0, 0.0, 1.0]])


def robot() -> dict[str, Any]:
    node = yaml.safe_load(Path("configs/robot/sim.yaml").read_text())
    # Of a busy machine that also runs tests: its policy is late, and then a lift presses on the
    # table with up to 110 N (60 N where it is on time).
    node["fresh"] = {"hold": 2.0, "stop": 6.0, "state": 4.0}
    node["force"] = 300
    return node


@pytest.fixture(scope="module")
def env() -> Iterator[RealEnv]:
    made = RealEnv(Config(robot(), WORLD, horizon=60, patience=PATIENT))
    yield made
    made.close()
    assert made.session.daemon.returncode == 0 and not made.session.folder.exists()


@only_all
def test_an_emulated_robot_is_started_and_shared() -> None:
    """A Franka behind libfranka's protocol: one emulator for training and evaluation."""
    pytest.importorskip("franky")
    node = yaml.safe_load(Path("configs/robot/franka_sim.yaml").read_text())
    node["fresh"] = robot()["fresh"]
    # The emulated arm's time goes slower than the clock of its set-points.
    node["limits"]["tracking"] = [2.0] * 7
    node["tool_speed"] = 3.0
    config = Config(node, WORLD, patience=PATIENT)
    one = RealEnv(config)
    try:
        other = RealEnv(config)
        assert one.session is other.session and one.emulator is other.emulator
        other.close()
        before = one.reset()["state"]
        for _ in range(5):
            step = one.step(PUSH)
        assert not step.log["stopped"].item() and (step.next_obs["state"] - before).abs().max() > 0
        assert one.emulator is not None and SharedEmulator.known
    finally:
        one.close()
    assert not SharedEmulator.known


def test_a_scripted_policy_reaches_as_in_simulation_and_episodes_follow(env: RealEnv) -> None:
    require_same(Fr3(Fr3Config(task="reach", num_envs=1)).spec, env.spec, "simulation", "arm")
    actor = Actor(make_policy("scripted.fr3.Scripted", env.spec, task="reach", quality=1.0), 1)
    obs, first = env.reset(), torch.tensor([True])
    goals, ends = [], []
    left: list[torch.Tensor] = []
    env.add_pre_reset_hook(left.append)
    for _ in range(200):
        step = env.step(actor(obs, first))
        assert step.reward.item() == step.terminated.item() == step.log["success"].item()
        assert not step.log["stopped"].item()
        if step.ended.item():
            ends.append(step.terminated.item())
            goals.append(step.next_obs["state"][0, -3:].tolist())
            assert not torch.equal(step.obs["state"], step.next_obs["state"])
        obs, first = step.obs, step.ended
        if len(ends) == 2:
            break
    assert ends == [True, True] and goals[0] != goals[1], "another goal in each episode"
    assert len(left) == 2


def test_nobody_steps_and_the_arm_rests_and_goes_on(env: RealEnv) -> None:
    env.reset()
    env.step(PUSH)

    def rests() -> bool:  # while somebody updates a network
        env.session.update()
        assert env.session.mode != Mode.ESTOP
        return env.session.mode == Mode.IDLE

    wait_until(rests, "the arm is idle", PATIENT, 0.05)
    before = env.session.state["sent"].copy()
    for _ in range(8):
        step = env.step(PUSH)
    assert env.session.mode == Mode.RUNNING and not step.ended.item()
    assert abs(env.session.state["sent"] - before).max() > 0.01


def test_a_stop_ends_the_episode_and_waits_for_the_operator(env: RealEnv) -> None:
    env.reset()
    assert env.session.request(Verb.ESTOP)

    def operator() -> None:
        while not env.session.request(Verb.RESET):
            time.sleep(0.1)

    hand = threading.Timer(1.0, operator)
    hand.start()
    step = env.step(torch.zeros(1, 4))
    hand.join()
    assert step.log["stopped"].item() and step.truncated.item() and not step.terminated.item()
    assert not env.step(torch.zeros(1, 4)).log["stopped"].item(), "and on it goes"


def test_two_may_share_an_arm_one_after_the_other(env: RealEnv) -> None:
    env.reset()
    other = RealEnv(env.config)
    assert other.session is env.session
    other.reset()
    assert not other.step(torch.zeros(1, 4)).log["stopped"].item()
    other.close()
    step = env.step(torch.zeros(1, 4))
    assert step.truncated.item() and step.log["stopped"].item(), "it was not where it thinks"
    assert not env.step(torch.zeros(1, 4)).ended.item()


def test_what_an_arm_cannot_be(env: RealEnv) -> None:
    with pytest.raises(ConfigError, match="one arm"):
        RealEnv(Config(robot(), WORLD, num_envs=2))
    with pytest.raises(ConfigError, match="can't be set"):
        env.reset(task=torch.zeros(1, 3))
    turned = {**robot(), "controller": {**robot()["controller"], "turning": "yaw"}}
    with pytest.raises(ConfigError, match="turning="):
        RealEnv(Config(turned, WORLD))


def test_a_daemon_that_dies_is_told_of(env: RealEnv) -> None:
    node = {**robot(), "seconds": 5.0}  # not the other tests' arm
    other = RealEnv(Config(node, WORLD))
    assert other.session is not env.session
    other.reset()
    os.kill(other.session.daemon.pid, signal.SIGKILL)
    with pytest.raises(RobotSessionError, match=r"gone|tells"):
        for _ in range(500):
            other.step(torch.zeros(1, 4))
    other.deadman.close()
    other.session.close()
