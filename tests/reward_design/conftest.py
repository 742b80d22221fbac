"""Fixtures of the reward-design tests: an environment, its experience, a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.reward_design.designer import Board, Experience, gather
from embodied.sandbox.gate import Limits, Sandbox
from tests.reward_design.instant import WORLD, board


@pytest.fixture(scope="module")
def env() -> VecEnv:
    return build(WORLD, VecEnv)


@pytest.fixture(scope="module")
def experience(env: VecEnv) -> Experience:
    """Random steps, and steps into the goal from its left."""
    made = gather(env, 600, 0)
    x = 0.8 + 0.1 * torch.rand(64, generator=torch.Generator().manual_seed(0))
    into = torch.stack([x, torch.full((64,), 0.5)], 1)
    rows = {
        "obs/state": into,
        "next_obs/state": into + torch.tensor([0.05, 0.0]),
        "action": torch.tensor([[1.0, 0.0]]).repeat(64, 1),
    }
    assert made.success is not None
    return Experience(
        {key: torch.cat([made.rows[key], rows[key]]) for key in rows},
        torch.cat([made.success, torch.ones(64, dtype=torch.bool)]),
        torch.cat([made.random, torch.zeros(64, dtype=torch.bool)]),
        torch.cat([made.first, torch.ones(64 // env.num_envs, env.num_envs, dtype=torch.bool)]),
    )


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(Limits(cpu=0.5))


@pytest.fixture
def here(tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox) -> Board:
    """Where a search of this test begins."""
    return board(tmp_path, env, experience, sandbox)
