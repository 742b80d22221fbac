"""mjlab tasks in the worker: one batch on MuJoCo Warp.

`settings`: `task`, `device`, `action_scale`, `play`, `motion`, `horizon` (steps).
"""

from __future__ import annotations

from typing import Any

import torch
from mjlab.envs import ManagerBasedRlEnv
from mjlab.tasks.registry import list_tasks, load_env_cfg
from mjlab.utils.random import seed_rng

from .memory import grouped


class Rows:
    """All rows are one batch: they are stepped together, and share one random generator."""

    partial = False

    def __init__(self, settings: dict[str, Any], count: int) -> None:
        if settings["task"] not in list_tasks():
            raise ValueError(f"no task {settings['task']!r}; mjlab has {', '.join(list_tasks())}")
        config = load_env_cfg(settings["task"], play=settings["play"])
        # With its own reset inside of step, mjlab does not return the true next observation.
        config.scene.num_envs = count
        config.auto_reset = False
        config.seed = 0
        if settings["motion"]:
            config.commands["motion"].motion_file = settings["motion"]
        if settings["horizon"] is not None:
            period = config.sim.mujoco.timestep * config.decimation
            config.episode_length_s = settings["horizon"] * period
        device = settings["device"]
        if device == "auto":
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        self.env = ManagerBasedRlEnv(config, device=device)
        self.scale = settings["action_scale"]
        self.finite = config.is_finite_horizon
        obs = grouped(self.env.reset()[0])
        size = self.env.action_manager.total_action_dim
        self.spec = {
            "obs": {name: _leaf(value) for name, value in obs.items()},
            "act": {"shape": [size], "dtype": "float32", "low": -1.0, "high": 1.0},
            "dt": float(self.env.step_dt),
        }

    def reset(self, arrays: dict[str, Any], rows: Any, seeds: Any, seeded: bool) -> None:
        """Begin an episode in each of `rows`; the first seed is used if a seed was asked for."""
        if seeded:
            seed_rng(int(seeds[0]))
        obs, _ = self.env.reset(env_ids=torch.as_tensor(rows, device=self.env.device))
        for name, value in grouped(obs).items():
            arrays[f"obs/{name}"][rows] = value[rows].cpu().numpy()

    def step(self, arrays: dict[str, Any], rows: Any) -> None:
        """Step all rows; ended ones have to be reset before the next step."""
        action = torch.as_tensor(arrays["action"], device=self.env.device) * self.scale
        obs, reward, over, late, _ = self.env.step(action)
        over = over | late if self.finite else over
        for name, value in grouped(obs).items():
            arrays[f"next_obs/{name}"][:] = value.cpu().numpy()
        arrays["reward"][:] = reward.cpu().numpy()
        arrays["terminated"][:] = over.cpu().numpy()
        arrays["truncated"][:] = (late & ~over).cpu().numpy()


def _leaf(value: Any) -> dict[str, Any]:
    dtype = "uint8" if value.dtype == torch.uint8 else "float32"
    return {"shape": list(value.shape[1:]), "dtype": dtype, "low": None, "high": None}
