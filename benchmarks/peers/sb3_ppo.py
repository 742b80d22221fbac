"""Stable-Baselines3's PPO under our evaluation: its curve and ours, side by side.

    python -m benchmarks.peers.sb3_ppo env=Pendulum-v1 seed=0 steps=102400 num_envs=4 \
        horizon=1024 batch_size=64 gamma=0.9 lr=0.001 eval_every=20480 episodes=50 out=DIR

SB3's defaults except for the given settings. As in ours, observations are normalised by running
statistics (VecNormalize), rewards too with scale_rewards=true. Evaluation is deterministic, from
initial states that depend on the evaluation seed only. Writes DIR/metrics.jsonl.
"""

from __future__ import annotations

import sys

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from benchmarks.peers.sb3 import curve


def main(words: list[str]) -> None:
    given = dict(word.split("=", 1) for word in words)
    torch.set_num_threads(1)
    scaled, gamma = given.get("scale_rewards") == "true", float(given.get("gamma", 0.99))
    seed = int(given["seed"])
    raw = make_vec_env(given["env"], int(given["num_envs"]), seed)
    worlds = VecNormalize(raw, norm_reward=scaled, gamma=gamma)
    model = PPO(
        "MlpPolicy",
        worlds,
        learning_rate=float(given.get("lr", 3e-4)),
        n_steps=int(given["horizon"]),
        batch_size=int(given.get("batch_size", 64)),
        n_epochs=int(given.get("epochs", 10)),
        gamma=gamma,
        ent_coef=float(given.get("entropy", 0.0)),
        seed=seed,
        device="cpu",
    )
    curve(model, given, int(given["eval_every"]), worlds.normalize_obs)


if __name__ == "__main__":
    main(sys.argv[1:])
