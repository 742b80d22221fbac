"""Every environment YAML: shapes and types as the Spec says, seeds decide, rows are independent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied.core.build import build
from embodied.core.env import NotSavable, Step, VecEnv
from embodied.core.tensors import Tensors

# An arm is one row that no seed decides: tests/real_robot/test_env.py.
WIRED = {Path("configs/env/robot.yaml"), Path("configs/env/robot_shuttle.yaml")}
# mjlab needs an environment of its own: tests/envs/test_process.py.
APART = {Path("configs/env/mjlab.yaml")}
FILES = sorted({*Path("configs/env").glob("*.yaml")} - WIRED - APART)
GIVEN = {"gym": {"id": "MountainCarContinuous-v0"}}  # what a file leaves to the user


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def node(request: pytest.FixtureRequest) -> dict[str, Any]:
    given = GIVEN.get(request.param.stem, {})
    return yaml.safe_load(request.param.read_text()) | given | {"num_envs": 2}


def actions(env: VecEnv, steps: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shape = (steps, env.num_envs, *env.spec.act.shape)
    if env.spec.act.dtype == "int64":
        high = env.spec.act.high
        assert isinstance(high, int | float)
        return list(torch.randint(int(high) + 1, shape, generator=random))
    return list(torch.rand(shape, generator=random) * 2 - 1)


def fits(env: VecEnv, obs: Tensors) -> None:
    assert set(obs) == set(env.spec.obs)
    for name, leaf in env.spec.obs.items():
        assert obs[name].shape == (env.num_envs, *leaf.shape)
        assert obs[name].dtype == getattr(torch, leaf.dtype)


def test_a_step_is_what_the_spec_says(node: dict[str, Any]) -> None:
    env = build(node, VecEnv)
    fits(env, env.reset(3))
    for action in actions(env, 5):
        step: Step = env.step(action)
        fits(env, step.obs)
        fits(env, step.next_obs)
        assert step.reward.shape == (2,) and step.reward.dtype == torch.float32
        assert step.terminated.dtype == step.truncated.dtype == torch.bool
        assert not (step.terminated & step.truncated).any()
    assert env.spec.dt > 0
    assert env.spec == type(env.spec).from_json(env.spec.to_json())
    env.close()


def test_the_seed_decides(node: dict[str, Any]) -> None:
    env = build(node, VecEnv)
    plan = actions(env, 4)
    runs = []
    for seed in (1, 1, 2):
        first = env.reset(seed)
        steps = [env.step(action) for action in plan]
        names = sorted(first)
        seen = [first[n].clone().float().flatten() for n in names]
        seen += [s.next_obs[n].clone().float().flatten() for s in steps for n in names]
        runs.append(torch.cat(seen))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    env.close()


def test_state_goes_back_exactly_or_says_that_it_cannot(node: dict[str, Any]) -> None:
    env = build(node, VecEnv)
    env.reset(5)
    plan = actions(env, 6)
    env.step(plan[0])
    try:
        state = {key: value.clone() for key, value in env.get_state().items()}
    except NotSavable:
        return
    ends = []
    for _ in range(2):
        env.set_state(state)
        out = [env.step(action) for action in plan[1:]]
        ends.append(torch.cat([s.next_obs[n].float().flatten() for s in out for n in s.next_obs]))
    assert torch.equal(*ends)
    env.close()
