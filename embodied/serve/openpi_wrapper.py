"""Steerable: lets a client choose the noise of an openpi policy. Needs numpy, and nothing of ours.

openpi's websocket server passes the observation to `policy.infer(obs)` alone, and the policy's
transforms drop keys that they do not know, so noise that is sent in the observation has no effect.
This wrapper takes it out and passes it as `infer(obs, noise=...)`, and its `metadata` say so to the
client. Copy this file beside openpi's `scripts/serve_policy.py` and change two lines there:

    policy = Steerable(create_policy(args), horizon=50, action_dim=32)
    server = WebsocketPolicyServer(policy=policy, ..., metadata=policy.metadata)

`horizon` and `action_dim` are those of the model (`config.model.action_horizon`, `.action_dim`):
the noise is [horizon, action_dim] also where the robot has fewer joints. With `shared=True` the
noise is one vector [action_dim], repeated over the horizon, as the authors of DSRL do it. With
`checkpoint=FOLDER` of the weights, the metadata hold their hash: a run that steers this policy then
refuses another one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np


class Steerable:
    """An openpi policy whose noise may be in the observation, under the key `noise`."""

    def __init__(
        self,
        policy: Any,
        horizon: int,
        action_dim: int,
        shared: bool = False,
        checkpoint: str | None = None,
    ) -> None:
        self.policy, self.shape = policy, (horizon, action_dim)
        shape = [action_dim] if shared else [horizon, action_dim]
        offer: dict[str, Any] = {"version": 1, "noise": {"shape": shape, "normal": True}}
        if checkpoint is not None:
            offer["policy"] = weights_hash(checkpoint)
        self.metadata = {**getattr(policy, "metadata", {}), "embodied": offer}

    def infer(self, obs: dict[str, Any]) -> dict[str, Any]:
        noise = obs.get("noise")
        obs = {key: value for key, value in obs.items() if key != "noise"}
        if noise is None:
            return self.policy.infer(obs)
        chosen = np.broadcast_to(np.asarray(noise, np.float32), self.shape)
        return self.policy.infer(obs, noise=chosen)

    def reset(self) -> None:
        getattr(self.policy, "reset", lambda: None)()


def weights_hash(folder: str) -> str:
    """SHA-256 of the files of a checkpoint folder, with their names."""
    digest = hashlib.sha256()
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    if not files:
        raise FileNotFoundError(f"{folder} holds no files: give the folder of the weights")
    for file in files:
        digest.update(f"{file.relative_to(folder).as_posix()} {file.stat().st_size}\n".encode())
        with file.open("rb") as data:
            while block := data.read(2**20):
                digest.update(block)
    return digest.hexdigest()
