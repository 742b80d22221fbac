"""Every reset teacher in every environment that saves its rows: clocks begin anew, generators are
the env's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied.core import tensors as tt
from embodied.core.build import build
from embodied.core.env import NotSavable, VecEnv
from embodied.core.env_contract import errors_in_one_line, random_actions
from embodied.core.tensors import Tensors
from embodied.teachers.resets import reset_distribution
from embodied.teachers.resets.reset_distribution import ResetDistribution
from embodied.teachers.resets.reset_wrapper import ResetStateWrapper
from embodied.teachers.resets.state_library import Trajectories, record_trajectories, restored
from embodied.teachers.teacher import Curriculum
from envs.wrappers.time_limit import LimitConfig, TimeLimit
from tests.contract.test_env import FILES, GIVEN

TEACHERS = ("snapshot", "reverse", "trajectory")
PLAYER = {"_target_": "policies.random.Random"}
STEPS = 6  # of a recorded episode
COUNTS = {"numbers": {2}, "wrapper1/kept": {0}}
"""Columns that count steps and are no clocks: Crafter's time of day, a length of a history."""


@dataclass
class World:
    env: VecEnv
    saved: Trajectories

    def placed(self, seed: int) -> tuple[Tensors, Tensors]:
        """The state of the envs in the middle of other episodes, and with saved states taken."""
        self.env.reset(seed)
        for action in random_actions(self.env, 2, seed=seed):
            self.env.step(action)
        before = tt.each(self.env.get_state(), torch.clone)
        late = int(self.saved.time.argmax())
        rows = torch.arange(self.env.num_envs)
        index = torch.full_like(rows, late)
        return before, restored(before, rows, self.saved.states, index, self.env.state_roles)


@pytest.fixture(params=FILES, ids=lambda file: file.stem, scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    node = yaml.safe_load(request.param.read_text()) | GIVEN.get(request.param.stem, {})
    env = build({**node, "num_envs": 2}, VecEnv)
    # Short episodes; the limit is one more clock.
    env = TimeLimit(LimitConfig(STEPS), env)
    env.reset(0)
    try:
        env.get_state()
        _ = env.state_roles
    except NotSavable as reason:
        env.close()
        pytest.skip(str(reason))
    player = build(PLAYER, reset_distribution.Policy, spec=env.spec).eval()
    yield World(env, record_trajectories(player, env, 2, 2, seed=0, gamma=0.9))
    env.close()


def played(env: VecEnv, seed: int) -> list[Tensors]:
    """The states of the first steps of both envs, as long as no episode ends."""
    env.reset(seed)
    seen = [tt.each(env.get_state(), torch.clone)]
    for action in random_actions(env, 4, seed=seed):
        if env.step(action).ended.any():
            break
        seen.append(tt.each(env.get_state(), torch.clone))
    return seen


def counters(env: VecEnv) -> dict[str, list[int]]:
    """The columns of integer leaves that are 0 after a reset and the number of steps after each."""
    seen = max((played(env, seed) for seed in range(6)), key=len)
    assert len(seen) > 2, "no episode of three steps"
    found: dict[str, list[int]] = {}
    for key, value in seen[0].items():
        if value.is_floating_point() or value.dtype == torch.bool or key.startswith("obs/"):
            continue
        flat = torch.stack([state[key].reshape(2, -1).long() for state in seen])
        steps = torch.arange(len(seen))[:, None, None]
        columns = (flat == steps).flatten(0, 1).all(0).nonzero().flatten().tolist()
        found |= {key: columns} if columns else {}
    return found


def test_every_counter_of_steps_is_declared_a_clock(world: World) -> None:
    declared = world.env.state_roles.clocks
    for key, found in counters(world.env).items():
        columns = set(found) - COUNTS.get(key, set())
        if not columns:
            continue
        assert key in declared, f"{key}[{columns}] counts steps and is not declared a clock"
        known = declared[key]
        assert known is None or columns <= set(known), key


def test_clocks_begin_anew(world: World) -> None:
    _, after = world.placed(seed=5)
    roles = world.env.state_roles
    for key, columns in roles.clocks.items():
        flat = after[key].reshape(2, -1)
        assert not flat[:, list(columns)].any() if columns else not flat.any(), key
    # The episode is as long as one that begins in the environment's own reset.
    world.env.set_state(after)
    ends = [world.env.step(a) for a in random_actions(world.env, STEPS, seed=1)]
    alive = torch.ones(world.env.num_envs, dtype=torch.bool)
    for count, step in enumerate(ends, 1):
        assert not (step.truncated.cpu() & alive).any() or count == STEPS
        alive &= ~step.ended.cpu()
    assert ends[-1].truncated.cpu()[alive | ends[-1].truncated.cpu()].all()


def test_generators_are_the_own_ones_of_the_env(world: World) -> None:
    """The next episode of an env is the same whether or not it took over a saved state."""
    before, after = world.placed(seed=7)
    firsts = []
    for state in (before, after):
        world.env.set_state(state)
        firsts.append(tt.each(dict(world.env.reset()), torch.clone))
    for key in firsts[0]:
        assert torch.equal(firsts[0][key], firsts[1][key]), f"{key} of the next episode"


@pytest.mark.parametrize("name", TEACHERS)
def test_the_teacher_places_its_states(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random player stands in for a demonstrator: its episodes count as successful."""
    known = replace(world.saved, won=torch.full_like(world.saved.won, torch.nan))
    monkeypatch.setattr(reset_distribution, "record_trajectories", lambda *_: known)
    node: dict[str, Any] = yaml.safe_load(Path(f"configs/teacher/{name}.yaml").read_text())
    node |= {"player": PLAYER, "usual": 0.0, "limit": 0}
    resets = build(node, Curriculum, spec=world.env.spec, env=world.env, seed=0)
    assert isinstance(resets, ResetDistribution)
    env = ResetStateWrapper(world.env, resets)
    env.reset(2)
    placed, began = env.get_state(), env.memory["began"]
    assert (began >= 0).all()
    roles = world.env.state_roles
    own = {*roles.clocks, *roles.generators, *roles.times}
    for key, value in resets.paths.states.items():
        if key in placed and key not in own:
            assert torch.equal(placed[key].cpu(), value[began.cpu()]), key
    with errors_in_one_line(env, "step"):
        for action in random_actions(env, STEPS + 2, seed=4):
            env.step(action)
