"""A linear system with a termination, its recorded episodes, and a small model of it."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.writer import EpisodeWriter
from embodied.models.train import TrainConfig, train

SPEC = Spec(
    {"state": Leaf((2,), names=("x", "v"), unit="m")}, Leaf((1,), low=-1.0, high=1.0), dt=0.1
)
A = torch.tensor([[1.0, 0.1], [-0.1, 0.95]])
B = torch.tensor([[0.0], [0.1]])
WALL = 0.3  # an episode terminates beyond this position
LENGTH = 30


def step(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Next states [n, 2], rewards [n] and terminations [n] of states and actions [n, 1]."""
    following = state @ A.T + action @ B.T
    return following, -following[:, 0] + 0.5 * state[:, 1], following[:, 0] > WALL


def episode(random: torch.Generator) -> Tensors:
    """One episode of random actions."""
    state = 2 * torch.rand(1, 2, generator=random) - torch.tensor([1.4, 1.0])
    rows: list[Tensors] = []
    for _ in range(LENGTH):
        action = 2 * torch.rand(1, 1, generator=random) - 1
        following, reward, ended = step(state, action)
        rows.append({"obs/state": state, "action": action, "reward": reward, "terminated": ended})
        state = following
        if bool(ended):
            break
    steps = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    cut = torch.arange(len(rows)) == len(rows) - 1
    return {**steps, "truncated": cut & ~steps["terminated"], "next_obs/state": state[0]}


def record(folder: Path, count: int = 60, seed: int = 0) -> Path:
    """A dataset of `count` episodes."""
    random = torch.Generator().manual_seed(seed)
    with EpisodeWriter(folder, SPEC) as writer:
        for _ in range(count):
            writer.add(episode(random), "stay", {})
    return folder


def node(**settings: Any) -> dict[str, Any]:
    """A small ensemble."""
    small = {"hidden": [32, 32], "networks": 3, "elites": 2, "batch_size": 64}
    return {"_target_": "embodied.models.ensemble.MlpEnsemble", **small, **settings}


def fitted(folder: Path, **settings: Any) -> dict[str, str]:
    """Settings of `env=imagined`: a model of the system and a dataset, made in `folder`."""
    demos, out = str(record(folder / "demos")), str(folder / "model")
    train(TrainConfig(node(**settings), demos, out, device="cpu"))
    return {"model": out, "starts": demos}


@cache
def roughly_fitted() -> dict[str, str]:
    """The same in a temporary folder, once in a session, with a model that is hardly trained."""
    return fitted(Path(tempfile.mkdtemp()), most_updates=100)
