"""Stable-Baselines3's SAC under our evaluation: its curve and ours, side by side.

    python -m embodied.bench.peers.sb3_sac env=Hopper-v5 seed=0 steps=50000 output=DIR

Its own defaults but for `learning_starts`, given here as it is to ours; evaluation is
deterministic, on starts that depend on the evaluation seed only. Writes DIR/metrics.jsonl.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import torch
from stable_baselines3 import SAC


def evaluate(model: SAC, env_id: str, episodes: int, seed: int) -> float:
    """Mean return of `episodes` deterministic episodes."""
    env = gymnasium.make(env_id)
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed + episode)
        total, ended = 0.0, False
        while not ended:
            action, _ = model.predict(obs, deterministic=True)
            obs, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return float(np.mean(returns))


def main(words: list[str]) -> None:
    given = dict(word.split("=", 1) for word in words)
    steps, every = int(given["steps"]), int(given.get("eval_every", 10_000))
    folder = Path(given["output"])
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    env = gymnasium.make(given["env"])
    start = int(given.get("start", 5_000))
    model = SAC("MlpPolicy", env, seed=int(given["seed"]), learning_starts=start, device="cpu")
    began = time.perf_counter()
    with (folder / "metrics.jsonl").open("w") as out:
        for step in range(every, steps + 1, every):
            model.learn(every, reset_num_timesteps=False)
            score = evaluate(model, given["env"], int(given.get("episodes", 10)), 10_000)
            row = {"step": step, "seconds": time.perf_counter() - began, "eval/return": score}
            out.write(json.dumps(row) + "\n")
            out.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
