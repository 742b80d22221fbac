"""OGBench's single tasks: seeds, rewards, ends; play data; the contract of every environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("ogbench", reason="OGBench is not installed (extra: ogbench)")

from embodied.checks.env import CHECKS, EnvSubject
from embodied.core.build import ConfigError, build
from embodied.core.env import RETURN_ENDS, VecEnv
from embodied.core.errors import NotApplicable
from embodied.core.policy import Policy
from embodied.core.spec import DEMONSTRATOR
from embodied.datasets.collect import CollectConfig, collect
from embodied.datasets.lerobot.reader import read_episodes
from embodied.envs.ogbench.env import CUBE, Config, Ogbench
from tests.builders import node_of

FILES = sorted(Path("configs/env").glob("ogbench_*.yaml"))
TASK = "cube-single-singletask-v0"
PLACE = torch.tensor([0.5, 0.0, 0.02])  # of the benchmark's task
ORACLE = yaml.safe_load(Path("configs/demonstrator/ogbench_oracle.yaml").read_text())


@pytest.fixture(params=FILES, ids=lambda file: file.stem, scope="module")
def subject(request: pytest.FixtureRequest) -> Iterator[EnvSubject]:
    node = yaml.safe_load(request.param.read_text())
    made = EnvSubject(node, most_steps=200, most_seconds=2.0)
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract(subject: EnvSubject, check) -> None:
    try:
        check(subject)
    except NotApplicable as reason:
        pytest.skip(str(reason))


def test_a_cube_at_its_place_ends_the_episode_with_reward_0() -> None:
    env = Ogbench(Config(TASK, 2))
    assert env.spec.dt == 0.05 and env.spec.obs["state"].shape == (28,)
    env.reset(seed=0)
    still = torch.zeros(2, 5)
    before = env.step(still)
    assert before.reward.tolist() == [-1, -1] and not before.ended.any()
    move_cube(env, 1)
    env.step(still)  # success is that of the state before the step
    after = env.step(still)
    assert after.reward.tolist() == [-1, 0] and after.terminated.tolist() == [False, True]
    assert after.log["success"].tolist() == [False, True] and not after.truncated.any()
    env.close()


def move_cube(env: Ogbench, row: int) -> None:
    made = env.envs[row]
    data = (made.scene if env.play else made.made).unwrapped._data
    data.qpos[CUBE] = PLACE.numpy()


def test_the_oracle_brings_the_cube_to_its_targets() -> None:
    env = Ogbench(Config(TASK, 1, play=True))
    oracle = build(ORACLE, Policy, spec=env.spec)
    obs, carry = env.reset(seed=3), oracle.initial(1)
    scene = env.envs[0].scene.unwrapped
    target, close, moved = scene._data.mocap_pos.copy(), [], 0
    for _ in range(200):
        close.append(float(((scene._data.qpos[CUBE] - target) ** 2).sum() ** 0.5))
        action, carry = oracle.act(obs, carry, oracle.sample_noise(1))
        obs = env.step(action[:, 0]).obs
        if (scene._data.mocap_pos != target).any():
            assert close[-1] < 0.04 < close[0], "the cube is not where it should be"
            target, close, moved = scene._data.mocap_pos.copy(), [], moved + 1
    assert moved >= 2
    env.close()


def test_play_goes_on_where_the_task_is_solved() -> None:
    env = Ogbench(Config(TASK, 1, play=True, horizon=6))
    env.reset(seed=0)
    env.step(torch.zeros(1, 5))
    move_cube(env, 0)
    steps = [env.step(torch.zeros(1, 5)) for _ in range(5)]
    assert [step.reward.item() for step in steps] == [0, 0, 0, 0, 0]
    assert all(step.log["success"].all() and step.log[RETURN_ENDS].all() for step in steps)
    ends = [(step.ended.item(), step.truncated.item()) for step in steps]
    assert ends == [(False, False)] * 4 + [(True, True)], "an episode of play has its 6 steps"
    env.close()


def test_what_the_oracle_would_do_is_not_in_the_dataset(tmp_path: Path) -> None:
    node = node_of("envs.ogbench.env.Ogbench", id=TASK, play=True, horizon=12)
    config = CollectConfig(node, ORACLE, 2, str(tmp_path / "play"), 1, success_only=False)
    assert collect(config, lambda kept, played: None)[0] == 2
    episodes = read_episodes(tmp_path / "play")
    assert set(episodes.spec.obs) == {"state"} and episodes.steps["action"].abs().max() > 0.1
    assert (episodes.steps["reward"] == -1).all() and episodes.length.tolist() == [12, 12]
    assert not episodes.steps[RETURN_ENDS].any()
    env = build({**node, "play": False, "num_envs": 1}, VecEnv)
    assert env.spec.obs["state"] == episodes.spec.obs["state"] and env.spec.dt == 0.05
    env.close()


def test_mistakes_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"env\.id=cube-single-v0 is no single task"):
        Ogbench(Config("cube-single-v0"))
    with pytest.raises(ConfigError, match="no oracle for antmaze"):
        Ogbench(Config("antmaze-medium-singletask-v0", play=True))
    env = Ogbench(Config(TASK))
    assert DEMONSTRATOR not in env.spec.obs
    with pytest.raises(ConfigError, match=r"env\.play=true"):
        build(ORACLE, Policy, spec=env.spec)
    env.close()
