"""Running episodes that were lost with an actor process leave nothing behind."""

from __future__ import annotations

import torch

from embodied.buffers.replay import ReplayBuffer
from embodied.buffers.success import SuccessBuffer
from embodied.buffers.trajectory_columns import TrajectoryColumns
from embodied.core.env import Step
from embodied.core.tensors import Tensors
from embodied.evaluation.episode_stats import EpisodeMeans

LOST = torch.tensor([1])


def rows(reward: float) -> Tensors:
    return {"reward": torch.full((2,), reward), "discount": torch.full((2,), 0.5)}


def flags(*values: bool) -> torch.Tensor:
    return torch.tensor(values)


def test_returns_do_not_reach_back_into_a_lost_episode() -> None:
    columns = TrajectoryColumns(["returns"])
    columns.push(rows(8.0), None, flags(False, False))
    columns.forget(LOST)
    last = rows(1.0) | {"discount": torch.zeros(2)}
    done = columns.push(last, None, flags(True, True))
    assert done["reward"].tolist() == [8, 1, 1] and done["returns"].tolist() == [8.5, 1, 1]


def test_a_lost_episode_is_no_success() -> None:
    buffer = SuccessBuffer(10, ReplayBuffer(10))
    buffer.push(rows(8.0), None, flags(True, True), flags(False, False))
    buffer.forget(LOST)
    buffer.push(rows(1.0), None, flags(False, False), flags(True, True))
    assert buffer.kept.sample(100)["reward"].unique().tolist() == [1, 8] and len(buffer) == 2


def test_a_lost_episode_is_not_in_the_means() -> None:
    means, obs = EpisodeMeans(), {"state": torch.zeros(2, 1)}
    for reward, ended in ((5.0, False), (1.0, True)):
        late = flags(ended, ended)
        means.add(Step(obs, obs, torch.full((2,), reward), late & False, late, {}))
        if not ended:
            means.forget(LOST)
    assert means.drain() == {"return": 3.5, "length": 1.5}
