"""Our environments as LeRobot's: keys, shapes, success, ends of episodes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embodied as em
from embodied.envs.adapters.lerobot_env import LeRobotEnv

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
        for _ in range(101):
            obs, _, terminated, truncated, info = env.step(env.action_space.sample())
            if (terminated | truncated).any():
                break
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
