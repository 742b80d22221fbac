"""Every teacher YAML: tasks in the box, tickets in any order, exact resume, own randomness."""

from __future__ import annotations

import dataclasses
import typing
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from embodied.bench.teachers import outcome, ready
from embodied.core.build import ConfigError, build, resolve
from embodied.core.plain import pack, unpack
from embodied.core.spec import Leaf, Spec
from embodied.teachers.taught import Taught
from embodied.teachers.teacher import Outcome, Teacher
from envs.fr3 import Config, Fr3

FILES = sorted(Path("configs/teacher").glob("*.yaml"))
TASK = Leaf((3,), low=0.0, high=1.0, names=("goal_x", "goal_y", "goal_z"))
SPEC = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), 0.1, TASK)
BOX = {"goal_x": [0.2, 0.6], "goal_y": [0.5, 0.5]}  # goal_y has no width, goal_z all of it
SMALL = {"every": 60, "iterations": 10, "pretrain": 10, "steps": 5, "warmup": 40, "most": 30}
EPISODES = 180


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teachers")


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def node(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """The YAML's settings; skipped where its tasks are not a box (levels, saved states)."""
    settings = yaml.safe_load(request.param.read_text())
    settings |= small(settings["_target_"])
    try:
        made(ready(settings, SPEC, folder))
    except ConfigError as error:
        if "needs" not in str(error):
            raise
        pytest.skip(str(error))
    return ready(settings, SPEC, folder) | {"box": BOX}


def small(target: str) -> dict[str, int]:
    """Sizes with which a teacher has learned something after a few dozen episodes."""
    config = typing.get_type_hints(resolve(target).__init__)["config"]
    known = {field.name: field.default for field in dataclasses.fields(config)}
    return {name: min(size, known[name]) for name, size in SMALL.items() if name in known}


def made(node: dict[str, Any], seed: int = 0, spec: Spec = SPEC) -> Teacher:
    return build(node, spec=spec, seed=seed)


def play(teacher: Teacher, episodes: int, flight: int = 4, seed: int = 0) -> torch.Tensor:
    """Tasks [episodes, D], one at a time from `flight` in the air, which end in random order; the
    score grows with time and falls with the task's size."""
    random = np.random.default_rng(seed)
    air: list[tuple[torch.Tensor, torch.Tensor]] = []
    seen = []
    for played in range(episodes):
        air.append(teacher.sample(1))
        seen.append(air[-1][0])
        if len(air) == flight:
            task, ticket = air.pop(int(random.integers(flight)))
            ease = 1.5 - float(task.mean()) - 0.5 * (played < episodes / 2)
            teacher.update(ticket, outcome(float(random.random() < ease)))
    return torch.cat(seen)


def test_tasks_are_of_the_box(node: dict[str, Any]) -> None:
    """Before and after what it learns; an element of no width keeps its value."""
    tasks = play(made(node), EPISODES)
    assert tasks.shape == (EPISODES, 3) and tasks.dtype == torch.float32
    low, high = torch.tensor([0.2, 0.5, 0.0]), torch.tensor([0.6, 0.5, 1.0])
    assert torch.isfinite(tasks).all()
    assert (tasks >= low - 1e-6).all() and (tasks <= high + 1e-6).all()


def test_several_at_once_and_in_any_order(node: dict[str, Any]) -> None:
    teacher = made(node)
    for _ in range(30):
        tasks, tickets = teacher.sample(8)
        assert tasks.shape == (8, 3) and tickets.shape == (8,) and tickets.dtype == torch.int64
        order = torch.from_numpy(np.random.default_rng(1).permutation(8))
        half = Outcome(torch.rand(4), torch.ones(4), torch.ones(4))
        for part in order.split(4):
            teacher.update(tickets[part], half)
    assert not teacher.pending and len(set(tickets.tolist())) == 8
    with pytest.raises(KeyError):
        teacher.update(tickets[:1], outcome(1.0))  # an episode ends once


def test_an_outcome_that_is_no_number_teaches_nothing(node: dict[str, Any]) -> None:
    """One warning, however many; the finite ones of the same call still teach."""
    teacher, other = made(node), made(node)
    with pytest.warns(UserWarning, match="not a number"):
        teacher.update(teacher.sample(1)[1], outcome(float("nan")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(30):
            _, tickets = teacher.sample(2)
            ends = torch.tensor([float("nan"), 1.0])
            teacher.update(tickets, Outcome(ends, ends, torch.ones(2)))
        play(teacher, 30)
    assert teacher.dropped == 31
    play(other, 10)
    assert other.dropped == 0


def test_an_episode_that_never_ends(node: dict[str, Any]) -> None:
    teacher = made(node)
    _, stuck = teacher.sample(3)
    tasks = play(teacher, EPISODES, flight=1)
    assert torch.isfinite(tasks).all()
    assert set(stuck.tolist()) == set(teacher.pending)
    teacher.update(stuck, Outcome(torch.ones(3), torch.ones(3), torch.ones(3)))  # late, but known


def test_fewer_episodes_than_a_fit_needs(node: dict[str, Any]) -> None:
    teacher = made(node)
    play(teacher, 3, flight=1)
    assert torch.isfinite(teacher.sample(5)[0]).all()
    assert all(np.isfinite(value) for value in teacher.metrics().values())


def test_scores_that_are_all_the_same(node: dict[str, Any]) -> None:
    for score in (0.0, 1.0):
        teacher = made(node)
        for _ in range(12):
            _, tickets = teacher.sample(10)
            ends = torch.full((10,), score)
            teacher.update(tickets, Outcome(ends, ends, torch.ones(10)))
        assert torch.isfinite(teacher.sample(20)[0]).all()


def test_a_resumed_teacher_goes_on_exactly(node: dict[str, Any], tmp_path: Path) -> None:
    """As a checkpoint keeps it, with episodes in the air, into a teacher of another seed."""
    teacher, resumed = made(node), made(node, seed=5)
    play(teacher, 110)
    file = tmp_path / "state.pt"
    torch.save(pack(teacher.get_state()), file)
    first = play(teacher, 110, seed=1)
    state = unpack(torch.load(file, weights_only=True))
    for _ in range(2):  # the second time: what was saved has not moved
        resumed.set_state(state)
        assert resumed.pending.keys() == state["pending"].keys()
        assert torch.equal(first, play(resumed, 110, seed=1))


def test_the_seed_decides_and_nothing_else(node: dict[str, Any]) -> None:
    """Global generators neither matter nor move."""
    seen = []
    for seed, other in ((0, 1), (0, 2), (1, 2)):
        torch.manual_seed(other)
        np.random.seed(other)
        before, legacy = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore
        seen.append(play(made(node, seed), 90))
        assert torch.equal(before, torch.get_rng_state())
        assert np.array_equal(legacy, np.random.get_state()[1])  # type: ignore
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_it_teaches_a_real_world(node: dict[str, Any]) -> None:
    """FR3 reach: each episode has the task that was chosen for it."""
    env = Fr3(Config(task="reach", num_envs=2, threads=1, horizon=2))
    teacher = made({**node, "signal": "success"}, spec=env.spec)
    world = Taught(env, teacher)
    world.reset(0)
    for _ in range(6):
        step = world.step(torch.zeros(2, 4))
    assert teacher.issued == 2 + 6 and set(step.log["ticket"].tolist()) == {4, 5}
    assert torch.isfinite(step.obs["state"]).all() and teacher.dropped == 0
    world.close()
