"""A source of rows of one's own, and what scripts use of the project."""

from pathlib import Path

import torch

from embodied.compose import compose
from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodeWriter, read_episodes
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.data.replay import Replay
from embodied.data.source import Source
from embodied.loops.evaluate import evaluate

__all__ = ["Actor", "EpisodeWriter", "Fixed", "Replay", "pendulum", "played", "score", "shared"]


class Fixed:
    """Always the same rows."""

    def __init__(self, rows: Tensors) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows["reward"])

    def sample(self, n: int) -> Tensors:
        index = torch.randint(len(self), (n,))
        return {key: value[index] for key, value in self.rows.items()}


def shared(source: Source, n: int) -> Tensors:
    return source.sample(n)


def played(folder: Path) -> tuple[int, Spec]:
    episodes = read_episodes(folder)
    return len(episodes), episodes.spec


def pendulum() -> VecEnv:
    return build(compose("train", ["experiment=pendulum_sac"]).node["env"], VecEnv)


def score(run: Path, env: VecEnv, episodes: int) -> float:
    """Mean return of the policy of a run."""
    policy = checkpoint.load_policy(run, env.spec)
    return evaluate(policy, env, episodes, 0).returns.mean().item()
