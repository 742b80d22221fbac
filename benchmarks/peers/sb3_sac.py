"""Stable-Baselines3's SAC or TD3 under our evaluation: its curve and ours, side by side.

    python -m benchmarks.peers.sb3_sac env=Hopper-v5 seed=0 steps=50000 out=DIR
    python -m benchmarks.peers.sb3_sac algorithm=td3 hidden=128 start=500 env=... (as above)

SB3's defaults except for `learning_starts` and `hidden` (width of two layers), which are the same
as ours, and TD3's exploration noise of 0.1 (SB3's default is none). Evaluation is deterministic,
from initial states that depend on the evaluation seed only. Writes DIR/metrics.jsonl.
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.noise import NormalActionNoise

from benchmarks.peers.sb3 import curve


def main(words: list[str]) -> None:
    given = dict(word.split("=", 1) for word in words)
    torch.set_num_threads(1)
    env = gymnasium.make(given["env"])
    start = int(given.get("start", 5_000))
    settings: dict[str, Any] = {"seed": int(given["seed"]), "learning_starts": start}
    if "hidden" in given:
        settings["policy_kwargs"] = {"net_arch": [int(given["hidden"])] * 2}
    if given.get("algorithm") == "td3":
        zeros = np.zeros(env.action_space.shape or ())
        settings["action_noise"] = NormalActionNoise(zeros, zeros + 0.1)
        model = TD3("MlpPolicy", env, device="cpu", **settings)
    else:
        model = SAC("MlpPolicy", env, device="cpu", **settings)
    curve(model, given, int(given.get("eval_every", 10_000)))


if __name__ == "__main__":
    main(sys.argv[1:])
