"""robosuite tasks in the worker: `settings` has `task`, `robot`, `shaped` and `horizon`.

Observations are those of robomimic's low-dimensional policies, by its names; every episode loads
the scene anew, as robosuite does, so its seed decides sizes, places and the arm's noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import robosuite
from robosuite.controllers import load_composite_controller_config
from robosuite.environments import REGISTERED_ENVS

RATE = 20  # control steps per second
ROBOT = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
NUMBERS = {"dtype": "float32", "low": None, "high": None}
NAMES = {"object-state": "object", **{name: name for name in ROBOT}}


class Rows:
    """`count` separate simulations; a success ends an episode, `horizon` steps truncate it."""

    partial = True

    def __init__(self, settings: dict[str, Any], count: int) -> None:
        task = settings["task"]
        if task not in REGISTERED_ENVS:
            raise ValueError(
                f"no task {task!r}; robosuite has {', '.join(sorted(REGISTERED_ENVS))}"
            )
        self.envs = [_made(settings) for _ in range(count)]
        self.horizon = settings["horizon"]
        self.at = [0] * count
        obs = self.envs[0].reset()
        size = self.envs[0].action_dim
        self.spec = {
            "obs": {name: {**NUMBERS, "shape": np.shape(obs[key])} for key, name in NAMES.items()},
            "act": {"shape": [size], "dtype": "float32", "low": -1.0, "high": 1.0},
            "dt": 1.0 / RATE,
        }

    def reset(self, arrays: dict[str, Any], rows: Any, seeds: Any, seeded: bool) -> None:
        """Begin an episode in each of `rows`, from its seed."""
        for row, seed in zip(rows, seeds, strict=True):
            env = self.envs[row]
            # Sampler and robot draw from the generator that the scene is loaded with.
            env.rng = np.random.default_rng(int(seed))
            env.placement_initializer = None
            self.at[row] = 0
            _write(arrays, "obs", row, env.reset())

    def step(self, arrays: dict[str, Any], rows: Any) -> None:
        """Step each of `rows`; ended ones stay as they are until they are reset."""
        arrays["success_known"][0] = True
        for row in rows:
            env = self.envs[row]
            obs, reward, _, _ = env.step(arrays["action"][row].astype(np.float64))
            done = bool(env._check_success())
            self.at[row] += 1
            _write(arrays, "next_obs", row, obs)
            arrays["reward"][row] = reward
            arrays["success"][row] = done
            arrays["terminated"][row] = done
            arrays["truncated"][row] = not done and self.at[row] >= self.horizon


def _made(settings: dict[str, Any]) -> Any:
    controller = load_composite_controller_config(controller="BASIC", robot=settings["robot"])
    return robosuite.make(
        settings["task"],
        robots=settings["robot"],
        controller_configs=controller,
        has_renderer=False,
        has_offscreen_renderer=False,
        use_camera_obs=False,
        control_freq=RATE,
        reward_shaping=settings["shaped"],
        ignore_done=True,
    )


def _write(arrays: dict[str, Any], kind: str, row: int, obs: Any) -> None:
    for key, name in NAMES.items():
        arrays[f"{kind}/{name}"][row] = obs[key]
