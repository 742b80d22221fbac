"""Our environments as Gymnasium's, Stable-Baselines3's (which learns on them) and LeRobot's."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.vec_env import DummyVecEnv

import embodied as em
from embodied.envs.adapters.gymnasium_env import GymView
from embodied.envs.adapters.lerobot_env import LeRobotEnv
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.envs.gym import Config, Gym
from tests.tiers import only_all
from tests.toy_envs import Reach


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("name", ["Pendulum-v1", "CartPole-v1", "reach", "push", "lift", "insert"])
def test_gymnasium_checker_passes(name: str, flat: bool) -> None:
    ours = name.islower()
    env = Fr3(Fr3Config(task=name, num_envs=1)) if ours else Gym(Config(name))
    with warnings.catch_warnings():
        # Unbounded observations, and no registered id: advice, not errors.
        warnings.simplefilter("ignore")
        check_env(GymView(env, flat), skip_render_check=True)


def test_a_view_of_a_view_is_the_environment() -> None:
    """Gymnasium -> ours -> Gymnasium gives the original numbers, ends included."""
    view, peer = GymView(Gym(Config("CartPole-v1"))), gymnasium.make("CartPole-v1")
    seen, _ = view.reset(seed=7)
    peer.reset(seed=0)
    peer.unwrapped.state = seen.astype(np.float64)  # type: ignore[attr-defined]
    terminated = False
    while not terminated:
        obs, reward, terminated, truncated, _ = view.step(1)
        wanted = peer.step(1)
        np.testing.assert_allclose(obs, wanted[0], atol=1e-5)
        assert (reward, terminated, truncated) == wanted[1:4]
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        view.step(1)
    with pytest.raises(ValueError, match="got num_envs=2"):
        GymView(Gym(Config("CartPole-v1", num_envs=2)))


def test_reset_after_an_end_shows_the_episode_already_begun() -> None:
    view = GymView(Gym(Config("CartPole-v1", horizon=3)))
    view.reset(seed=0)
    for _ in range(3):
        obs, _, _, truncated, _ = view.step(0)
    begun, _ = view.reset()
    other, _ = view.reset()
    assert truncated
    assert not np.array_equal(begun, obs) and not np.array_equal(begun, other)


def peer(n: int) -> DummyVecEnv:
    return DummyVecEnv([lambda: GymView(Reach(1))] * n)


def mean_return(view: DummyVecEnv, choose: Callable[[Any], np.ndarray]) -> float:
    """The mean return of an episode of 20 steps under `choose(obs)`."""
    obs, total = view.reset(), np.zeros(view.num_envs)
    for _ in range(20):
        obs, reward, _, _ = view.step(choose(obs))
        total += reward
    return float(total.mean())


@only_all
def test_stable_baselines_learns_to_reach() -> None:
    from stable_baselines3 import SAC

    torch.set_num_threads(1)
    network = {"gamma": 0.9, "ent_coef": 0.01, "policy_kwargs": {"net_arch": [64, 64]}}
    pace = {"learning_rate": 1e-3, "learning_starts": 400, "gradient_steps": 2, "batch_size": 128}
    model = SAC("MlpPolicy", peer(8), seed=0, **network, **pace)
    model.learn(2400)
    held_out, generator = peer(50), np.random.default_rng(0)
    held_out.seed(100)
    random = mean_return(held_out, lambda obs: generator.uniform(-1, 1, (50, 2)).astype(np.float32))
    held_out.seed(100)
    learned = mean_return(held_out, lambda obs: model.predict(obs, deterministic=True)[0])
    assert random < -10 and learned > -4, (learned, random)


FILE = Path(__file__).parents[2] / "plugins" / "envhub" / "env.py"


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("envhub_env", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("apart", [False, True])
def test_the_file_makes_a_vector_environment(apart: bool) -> None:
    env = loaded().make_env(n_envs=2, use_async_envs=apart)
    try:
        obs, _ = env.reset(seed=3)
        assert set(obs) == {"agent_pos", "environment_state"}
        assert obs["agent_pos"].shape == (2, 2) and obs["agent_pos"].dtype == np.float32
        np.testing.assert_array_equal(obs["agent_pos"], obs["environment_state"])
        assert env.call("_max_episode_steps") == (100, 100)
        assert env.call("task_description")[0] == "go through a gap"
        ended, info = np.zeros(2, bool), {}
        while not ended.any():
            obs, _, terminated, truncated, info = env.step(env.action_space.sample())
            ended = terminated | truncated
        assert "is_success" in info["final_info"], "an episode has ended, and says how"
        assert env.observation_space.contains(obs)
    finally:
        env.close()


def test_images_are_pixels_and_critics_see_more() -> None:
    env = LeRobotEnv(em.make_env("fr3_lift_pixels", image_size=32), "lift the cube", 5)
    try:
        obs, _ = env.reset(seed=0)
        assert obs["pixels"]["front"].dtype == np.uint8
        assert not any(name.startswith(("critic", "privileged")) for name in obs)
        assert env.observation_space.contains(obs)
        ends = [env.step(env.action_space.sample())[2:4] for _ in range(5)]
        assert ends[-1][1] or any(end[0] for end in ends)
    finally:
        env.close()
