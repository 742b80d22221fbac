"""Hindsight: returns to go and next actions by hand, offline and as episodes end."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from embodied.buffers.trajectory_columns import (
    TrajectoryColumns,
    columns_of_episodes,
    next_actions,
    returns_to_go,
)
from embodied.core.tensors import Tensors, cat, each
from embodied.datasets.transitions import transitions
from embodied.policies.random import Config as RandomConfig
from embodied.policies.random import Random
from embodied.training.collector import Collector
from tests.datasets.test_transitions import TWO
from tests.toy_envs import Config, Counter

BOTH = ("returns", "next_action")


def test_returns_by_hand() -> None:
    """1 2 4, ended; 8 16 32, cut: 32 / (1 - 0.5) = 64, 16 + 32, 8 + 24."""
    reward = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    discount = torch.tensor([0.5, 0.5, 0.0, 0.5, 0.5, 0.5])
    found = returns_to_go(reward, discount, torch.tensor([3, 3]))
    assert found.tolist() == [1 + 0.5 * 4, 2 + 2, 4, 32, 48, 64]
    rows = transitions(TWO, 0.5)
    assert columns_of_episodes(TWO, rows, BOTH, 0.5, 1)["returns"].tolist() == found.tolist()


def test_episodes_of_different_lengths() -> None:
    reward, discount = torch.arange(1.0, 7.0), torch.full((6,), 0.5)
    discount[[0, 5]] = 0.0
    found = returns_to_go(reward, discount, torch.tensor([1, 2, 3]))
    # 1 | 3 / 0.5 after 2 | 4 + (5 + 6 / 2) / 2
    assert found.tolist() == [1, 2 + 0.5 * 6, 6, 4 + 0.5 * 8, 5 + 3, 6]


def test_an_undiscounted_cut_counts_what_was_seen() -> None:
    reward, discount = torch.tensor([1.0, 2.0]), torch.ones(2)
    assert returns_to_go(reward, discount, torch.tensor([2])).tolist() == [3, 2]


def test_next_actions_by_hand() -> None:
    action = torch.arange(6.0)[:, None]
    found = next_actions(action, torch.tensor([2, 4])).flatten().tolist()
    assert [None if math.isnan(x) else x for x in found] == [1, None, 3, 4, 5, None]
    found = next_actions(action, torch.tensor([2, 4]), 2).flatten().tolist()
    assert [None if math.isnan(x) else x for x in found] == [None, None, 4, 5, None, None]


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key].nan_to_num(9e9), other[key].nan_to_num(9e9)) for key in one
    )


@pytest.mark.parametrize("chunk", [1, 2])
def test_rows_come_out_when_their_episode_ends(chunk: int) -> None:
    """Counter's row 0 ends (3 steps), row 1 is cut (5): the same rows in their order, completed."""

    def play(steps: int, hindsight: TrajectoryColumns | None) -> tuple[Collector, list[Tensors]]:
        torch.manual_seed(0)
        env = Counter(Config())
        rollout = Collector(env, Random(RandomConfig(chunk=chunk), env.spec), 0.5)
        out = []
        for _ in range(steps):
            rows, step = rollout.step()
            if hindsight is not None:
                rows = hindsight.push(rows, rollout.finished, step.ended)
            out.append(each(rows, torch.clone))
        return rollout, out

    _, plain = play(5, None)
    _, late = play(5, TrajectoryColumns(BOTH))
    assert [len(rows.get("reward", [])) for rows in late] == (
        [0, 0, 3, 0, 5] if chunk == 1 else [0, 0, 2, 0, 3]
    )
    whole = cat([rows for rows in plain if rows])
    for rows in (late[2], late[4]):
        begin = rows["obs/state"][0].item()
        mine = (whole["obs/state"].flatten() >= begin) & (whole["obs/state"].flatten() < begin + 5)
        index = mine.nonzero().flatten()[: len(rows["reward"])]
        assert torch.equal(rows["action"], whole["action"][index])
        assert torch.equal(rows["next_action"][:-1], rows["action"][1:])
        assert rows["next_action"][-1].isnan().all()
    first = late[2]["returns"].tolist()
    assert first == [0 + 0.5 * (1 + 0.5 * 2), 1 + 0.5 * 2, 2][:: 1 if chunk == 1 else 2]
    if chunk == 1:
        assert late[4]["returns"][-1].item() == 104 / 0.5
        assert late[4]["returns"][-2].item() == 103 + 104


def test_what_is_held_is_saved() -> None:
    torch.manual_seed(0)
    env = Counter(Config())
    rollout = Collector(env, Random(RandomConfig(), env.spec), 0.5)
    one, other = TrajectoryColumns(BOTH), TrajectoryColumns(BOTH)
    state: dict[str, Any] = {}
    for t in range(10):
        rows, step = rollout.step()
        if t == 4:
            state = one.get_state()
            other.set_state(state)
        out = one.push(dict(rows), rollout.finished, step.ended)
        if t >= 4:
            assert same(out, other.push(dict(rows), rollout.finished, step.ended))
    other.set_state(TrajectoryColumns(BOTH).get_state())
    assert not other.held
