"""Shared code of the Stable-Baselines3 comparisons: updates, evaluation, learning curve."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.logger import configure

from benchmarks.measure import Block

Seen = Callable[[Any], Any]


def updating(
    algorithm: str, obs: int, act: int, stored: int, batch: int, count: int, **policy: Any
) -> Block:
    """SB3's `train` on the CPU (`algorithm` sac or td3), with `stored` random transitions in its
    buffer."""

    class World(gymnasium.Env[np.ndarray, np.ndarray]):
        observation_space = Box(-np.inf, np.inf, (obs,), np.float32)
        action_space = Box(-1.0, 1.0, (act,), np.float32)

    model = {"sac": SAC, "td3": TD3}[algorithm](
        "MlpPolicy",
        World(),
        policy_kwargs=policy,
        batch_size=batch,
        buffer_size=stored,
        device="cpu",
    )
    model.set_logger(configure(None, []))
    buffer: Any = model.replay_buffer
    for rows in (buffer.observations, buffer.next_observations, buffer.actions):
        rows[:] = np.random.randn(*rows.shape).clip(-1, 1)
    buffer.full = True

    def block() -> int:
        model.train(count, batch)
        return count

    return block


def curve(
    model: BaseAlgorithm, given: Mapping[str, str], every: int, seen: Seen = np.asarray
) -> None:
    """Train to `given["steps"]`, evaluate every `every` steps, write OUTPUT/metrics.jsonl.

    `seen` maps an observation to the model's input (its normaliser, if it has one).
    """
    folder = Path(given["out"])
    folder.mkdir(parents=True, exist_ok=True)
    episodes, began = int(given.get("episodes", 10)), time.perf_counter()
    with (folder / "metrics.jsonl").open("w") as out:
        for step in range(every, int(given["steps"]) + 1, every):
            model.learn(every, reset_num_timesteps=False)
            score = evaluate(model, given["env"], episodes, 10_000, seen)
            row = {"step": step, "seconds": time.perf_counter() - began, "eval/return": score}
            out.write(json.dumps(row) + "\n")
            out.flush()


def evaluate(
    model: BaseAlgorithm, env_id: str, episodes: int, seed: int, seen: Seen = np.asarray
) -> float:
    """Mean return of `episodes` deterministic episodes with reset seeds `seed`, `seed` + 1, ..."""
    env = gymnasium.make(env_id)
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed + episode)
        total, ended = 0.0, False
        while not ended:
            action, _ = model.predict(seen(obs), deterministic=True)
            obs, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return float(np.mean(returns))
