"""Every reset teacher in every environment that saves its rows: clocks begin anew, generators are
the env's own."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied import envs
from embodied.checks.teacher import need
from embodied.core import tensors as tt
from embodied.core.build import build, resolve
from embodied.core.env import NotSavable, StateRoles, VecEnv, restored
from embodied.core.env_contract import errors_in_one_line, random_actions
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.envs.wrappers.episodes import LimitConfig, TimeLimit
from embodied.teachers.resets import reset_distribution
from embodied.teachers.resets.reset_distribution import (
    ResetDistribution,
    ResetStateWrapper,
    Trajectories,
    record_trajectories,
)
from embodied.teachers.teacher import Curriculum
from tests.contract.environments import APART, FILES, WIRED
from tests.contract.test_parts import TEACHERS

NODES = {file.stem: yaml.safe_load(file.read_text()) for file in TEACHERS}
TEACHERS = [name for name, node in NODES.items() if need(node["_target_"]) == "states"]
PLAYER = {"_target_": "embodied.policies.random.Random"}
ALL = {*Path("configs/env").glob("*.yaml")}
INSIDE = {
    "Rows": "MiniGrid with the Gymnasium back end",
    "Pool": "MiniGrid with EnvPool's",
    "NanGuard": "keeps no state",
}
"""Classes that no YAML names, and where they are."""
MISSING = () if find_spec("ogbench") else ("ogbench",)
"""Packages of environments that are in no extra of the tests."""
BY_OTHERS = (
    "embodied.envs.process.worker",
    "embodied.envs.hardware_sim",
    *(f"embodied.envs.{name}" for name in MISSING),
)
"""Modules that need another Python or a missing package, or that are no environments."""
STEPS = 6  # of a recorded episode
WORD = 2**24
LONG = 100  # steps of an episode that goes on after a state was taken over
FEW = 30  # the same where pictures are rendered
COUNTS: dict[str, dict[str, set[int]]] = {
    "": {
        "physics": {0},  # seconds of MuJoCo, which nothing reads
        "wrapper1/kept": {0},  # the length of a history
        "wrapper1/clock": {0},  # seconds of an energy tank, which reads differences only
        "wrapper1/counts": set(range(1000)),  # how often each symbol was seen
        "wrapper1/frame": {0},  # of the clip that is followed: a part of the state
        "wrapper1/age": {0},  # steps of the mean reward of an episode, kept with their sum
    },
    # The time of day; hunger, thirst and tiredness of the player.
    "Crafter": {"numbers": {2}, "vitals": {0, 1, 2, 3}},
}
"""Columns that grow with every step and are no clocks of an episode."""
TELLS_TIME = {"clock", "critic/time_left"}  # observations that say how late in the episode it is


def test_every_environment_class_is_put_to_the_test() -> None:
    """By a YAML of its own, or inside of one; a new class is found here without being listed."""
    here = [file for file in ALL if not file.stem.startswith(MISSING)]
    made = {kind for file in here for kind in targets(yaml.safe_load(file.read_text()))}
    assert ALL - set(FILES) == WIRED | APART
    for module in pkgutil.walk_packages(envs.__path__, "embodied.envs."):
        if not module.name.startswith(BY_OTHERS):
            importlib.import_module(module.name)
    known = {kind for kind in below(VecEnv) if kind.__module__.startswith("embodied.envs.")}
    missing = {kind.__name__ for kind in known if not any(issubclass(m, kind) for m in made)}
    assert missing == set(INSIDE)


def targets(node: Any) -> Iterator[type]:
    """The classes that a YAML names."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for each in inner:
        yield from targets(each)
    if isinstance(node, dict) and "_target_" in node:
        yield resolve(node["_target_"], object)


def below(kind: type) -> set[type]:
    """All subclasses."""
    return {each for sub in kind.__subclasses__() for each in {sub, *below(sub)}}


@dataclass
class World:
    env: TimeLimit
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


@pytest.fixture(scope="session")
def world(env: VecEnv) -> World:
    """The environment with short episodes, whose limit is one more clock."""
    limited = TimeLimit(LimitConfig(STEPS), env)
    if reason := refusal(limited):
        pytest.skip(reason)
    if limited.step(random_actions(limited, 1, seed=0)[0]).ended.all():
        pytest.skip("an episode is one step, which begins in no saved state")
    player = build(PLAYER, reset_distribution.Policy, spec=env.spec).eval()
    return World(limited, record_trajectories(player, limited, 2, 2, seed=0, gamma=0.9))


def refusal(env: VecEnv) -> str:
    """Why no state can be taken over; empty where it can. An environment that saves its rows has to
    say so itself: it is not enough to have forgotten `state_roles`."""
    env.reset(0)
    try:
        env.get_state()
        assert type(innermost(env)).state_roles is not VecEnv.state_roles, "it declares no roles"
        _ = env.state_roles
    except NotSavable as reason:
        return str(reason)
    return ""


def innermost(env: VecEnv) -> VecEnv:
    while isinstance(env, Wrapper):
        env = env.env
    return env


def played(env: VecEnv, seed: int) -> list[Tensors]:
    """The states of the first steps of both envs, as long as no episode ends."""
    env.reset(seed)
    seen = [tt.each(env.get_state(), torch.clone)]
    for action in random_actions(env, 4, seed=seed):
        if env.step(action).ended.any():
            break
        seen.append(tt.each(env.get_state(), torch.clone))
    return seen


def counters(env: VecEnv) -> dict[str, set[int]]:
    """The columns that every step of every env increases (or decreases) by the same amount."""
    seen = max((played(env, seed) for seed in range(6)), key=len)
    assert len(seen) > 2, "no episode of three steps"
    found: dict[str, set[int]] = {}
    for key, value in seen[0].items():
        if value.dtype == torch.bool or key.startswith("obs/"):
            continue
        change = torch.stack([state[key].reshape(2, -1).double() for state in seen]).diff(dim=0)
        same = (change - change[0, 0]).abs() <= 1e-6 * change[0, 0].abs()
        found[key] = set(((change[0, 0] != 0) & same.all(0).all(0)).nonzero().flatten().tolist())
    return found


def test_every_counter_of_steps_is_declared_a_clock(world: World) -> None:
    roles = world.env.state_roles
    fine = COUNTS[""] | COUNTS.get(type(innermost(world.env)).__name__, {})
    for key, found in counters(world.env).items():
        known = [part[key] for part in (roles.clocks, roles.generators) if key in part]
        columns = found - fine.get(key, set()) - {c for each in known if each for c in each}
        assert not columns or None in known, f"{key}{columns} grows by steps: declare it a clock"


def test_every_random_word_is_declared_a_generators(world: World) -> None:
    """Whole numbers beyond 2^24 count nothing: they are words of a generator, or a seed."""
    declared = world.env.state_roles.generators
    for key, value in played(world.env, 3)[-1].items():
        if value.is_floating_point() or key.startswith("obs/"):
            continue
        words = (value.reshape(2, -1).long().abs() > WORD).any(0).nonzero().flatten().tolist()
        known = declared.get(key, ())
        assert known is None or set(words) <= set(known), f"{key}: declare it a generator"


def test_clocks_begin_anew(world: World) -> None:
    """The episode is as long as one that begins in the environment's own reset."""
    _, after = world.placed(seed=5)
    for key, columns in world.env.state_roles.clocks.items():
        flat = after[key].reshape(2, -1)
        assert not (flat[:, list(columns)] if columns else flat).any(), key
    world.env.set_state(after)
    ends = [world.env.step(a) for a in random_actions(world.env, STEPS, seed=1)]
    alive = torch.ones(world.env.num_envs, dtype=torch.bool)
    for count, step in enumerate(ends, 1):
        assert not (step.truncated.cpu() & alive).any() or count == STEPS
        alive &= ~step.ended.cpu()
    last = ends[-1].truncated.cpu()
    assert last[alive | last].all()


def continued(env: VecEnv, state: Tensors) -> list[Tensors]:
    """Observations and rewards [1] of env 0 from `state` on, until its first episode ends."""
    env.set_state(tt.each(state, torch.clone))
    seen = []
    drawn = any(leaf.is_image or leaf.is_points for leaf in env.spec.obs.values())
    for action in random_actions(env, FEW if drawn else LONG, seed=3):
        step = env.step(action)
        if step.ended[0]:
            break
        told = {key: leaf for key, leaf in step.next_obs.items() if key not in TELLS_TIME}
        seen.append({key: leaf[:1].clone() for key, leaf in {**told, "": step.reward}.items()})
    return seen


def test_an_episode_goes_on_as_it_was_saved(world: World) -> None:
    """Events that were due k steps after the saved state are due k steps after it was taken."""
    env = world.env.env
    env.reset(9)
    for action in random_actions(env, 3, seed=9):
        env.step(action)
    saved, roles = tt.each(env.get_state(), torch.clone), env.state_roles
    rows = torch.arange(env.num_envs)
    anew = restored(saved, rows, saved, rows, StateRoles(roles.clocks, {}, roles.times))
    both = zip(continued(env, saved), continued(env, anew), strict=False)
    for at, (one, other) in enumerate(both):
        for key in one:
            what = key or "the reward"
            assert torch.equal(one[key], other[key]), f"{what}, {at + 1} steps later"


def test_generators_are_the_own_ones_of_the_env(world: World) -> None:
    """The next episode of an env is the same whether or not it took over a saved state, noise of
    its steps included, and two envs that took over one state have different ones."""
    before, after = world.placed(seed=7)
    for key, columns in world.env.state_roles.generators.items():
        own = slice(None) if columns is None else list(columns)
        assert torch.equal(after[key].reshape(2, -1)[:, own], before[key].reshape(2, -1)[:, own])
    episodes = []
    for state in (before, after):
        world.env.set_state(state)
        first = tt.each(dict(world.env.reset()), torch.clone)
        steps = [world.env.step(action) for action in random_actions(world.env, 2, seed=8)]
        episodes.append([first, *(tt.each(step.next_obs, torch.clone) for step in steps)])
    for one, other in zip(*episodes, strict=True):
        for key in one:
            assert torch.equal(one[key], other[key]), f"{key} of the next episode"
    differ = [not torch.equal(v[0], v[1]) for obs in episodes[1] for v in obs.values()]
    assert any(differ), "both envs have the same next episode"


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
