"""Rows that close: discounts, true successors and n-step windows, against arithmetic by hand."""

from __future__ import annotations

import torch

from embodied.core import tensors as tt
from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.training.collector import Collector
from tests.toy_envs import Config, Counter

GAMMA = 0.5


def rollout(chunk: int = 1, n_step: int = 1, rows: int = 2) -> Collector:
    env = Counter(Config(num_envs=rows))
    policy = build(
        {"_target_": "embodied.policies.random.Random", "chunk": chunk}, Policy, spec=env.spec
    )
    return Collector(env, policy, GAMMA, n_step)


def gather(run: Collector, steps: int) -> dict[str, list[float]]:
    parts = [rows for rows, _ in (run.step() for _ in range(steps)) if rows and len(rows["reward"])]
    rows = tt.cat(parts)
    order = torch.argsort(rows["obs/state"].flatten(), stable=True)
    names = ("obs/state", "reward", "discount", "next_obs/state")
    return {name: rows[name].flatten()[order].tolist() for name in names}


def test_single_steps() -> None:
    rows = gather(rollout(), 3)
    assert rows["obs/state"] == [0, 1, 2, 100, 101, 102]
    assert rows["reward"] == rows["obs/state"]
    # Row 0 terminates in its third step: nothing follows, yet the true successor is kept.
    assert rows["discount"] == [GAMMA, GAMMA, 0, GAMMA, GAMMA, GAMMA]
    assert rows["next_obs/state"] == [1, 2, 3, 101, 102, 103]


def test_time_limit_still_counts() -> None:
    run = rollout()
    for _ in range(4):
        run.step()
    rows, step = run.step()
    assert step.truncated.tolist() == [False, True]
    assert rows["discount"].tolist() == [GAMMA, GAMMA]
    assert rows["next_obs/state"].flatten().tolist()[1] == 105
    assert step.obs["state"].flatten().tolist()[1] == 100


def test_chunks_are_cut_at_the_end_and_rows_are_independent() -> None:
    rows = gather(rollout(chunk=2), 6)
    # Row 0 (3 steps, terminates): decisions at 0 (2 steps) and 2 (1 step), twice.
    # Row 1 (5 steps, time limit): decisions at 100, 102 and 104 (cut to 1 step); then 100 again.
    assert rows["obs/state"] == [0, 0, 2, 2, 100, 102, 104]
    assert rows["reward"] == [0.5, 0.5, 2, 2, 100 + 50.5, 102 + 51.5, 104]
    assert rows["discount"] == [0.25, 0.25, 0, 0, 0.25, 0.25, 0.5]
    assert rows["next_obs/state"] == [2, 2, 3, 3, 102, 104, 105]


def test_n_step_windows() -> None:
    rows = gather(rollout(n_step=2), 5)
    # Row 0 ends after 3 steps and leaves three rows, the last two of 2 and of 1 step.
    first = rows["obs/state"][:4]
    assert first == [0, 0, 1, 2]
    assert rows["reward"][:4] == [0 + 0.5, 0 + 0.5, 1 + 1.0, 2]
    assert rows["discount"][:4] == [0.25, 0.25, 0, 0]
    assert rows["next_obs/state"][:4] == [2, 2, 3, 3]
    assert rows["obs/state"][4:] == [100, 101, 102, 103, 104]
    assert rows["discount"][4:] == [0.25, 0.25, 0.25, 0.25, 0.5]
    assert rows["next_obs/state"][4:] == [102, 103, 104, 105, 105]


def test_state_round_trip() -> None:
    for chunk, n_step in ((1, 1), (2, 1), (1, 3)):
        run, other = rollout(chunk, n_step), rollout(chunk, n_step)
        torch.manual_seed(0)
        for _ in range(4):
            run.step()
        other.set_state(run.get_state())
        generator = torch.get_rng_state()
        expected = [run.step()[0] for _ in range(5)]
        torch.set_rng_state(generator)
        for rows in expected:
            again = other.step()[0]
            assert rows.keys() == again.keys()
            assert all(torch.equal(rows[key], again[key]) for key in rows)
