"""Every teacher YAML that chooses levels: fit to be played, tickets in any order, exact resume."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from embodied.core.build import build, resolve
from embodied.core.plain import pack, unpack
from embodied.teachers.teacher import Outcome, Teacher
from envs.maze import Config, Maze

FILES = sorted(Path("configs/teacher").glob("*.yaml"))
WORLD = Maze(Config(side=5, blocks=8, num_envs=2))
EPISODES = 90
SMALL: dict[str, Any] = {"size": 10, "autoencoder": {"pool": 64, "steps": 3, "latent": 4}}


NODES = {file.stem: yaml.safe_load(file.read_text()) for file in FILES}
NODES = {
    name: node
    for name, node in NODES.items()
    if "levels" in inspect.signature(resolve(node["_target_"])).parameters
}


@pytest.fixture(params=NODES, ids=str)
def node(request: pytest.FixtureRequest) -> dict[str, Any]:
    node = NODES[request.param]
    return node | {key: small for key, small in SMALL.items() if key in node}


def made(node: dict[str, Any], seed: int = 0) -> Teacher:
    return build(node, spec=WORLD.spec, levels=WORLD.levels, seed=seed)


def outcome(*scores: float) -> Outcome:
    value = torch.tensor(scores)
    return Outcome(value, value, torch.full_like(value, 5), value, value, 0.5 * value)


def play(teacher: Teacher, episodes: int, flight: int = 4, seed: int = 0) -> torch.Tensor:
    """Levels [episodes, D], one at a time from `flight` in the air, which end in random order."""
    random = np.random.default_rng(seed)
    air: list[tuple[torch.Tensor, torch.Tensor]] = []
    seen = []
    for _ in range(episodes):
        air.append(teacher.sample(1))
        seen.append(air[-1][0])
        if len(air) == flight:
            _, ticket = air.pop(int(random.integers(flight)))
            teacher.update(ticket, outcome(float(random.random())))
    return torch.cat(seen)


def test_there_are_teachers_of_levels() -> None:
    assert {"dr", "plr", "accel", "paired", "clutr"} <= set(NODES)


def test_levels_can_be_solved_and_are_not_held_out(node: dict[str, Any]) -> None:
    levels = play(made(node), EPISODES).double().numpy()
    assert levels.shape == (EPISODES, 28) and WORLD.levels.fit(levels).all()
    assert len(np.unique(levels, axis=0)) > 10


def test_several_at_once_and_in_any_order(node: dict[str, Any]) -> None:
    teacher = made(node)
    for _ in range(10):
        tasks, tickets = teacher.sample(8)
        assert tasks.dtype == torch.float32 and tickets.dtype == torch.int64
        assert teacher.trains(tickets).shape == (8,)
        for part in torch.randperm(8).split(4):
            teacher.update(tickets[part], outcome(0.1, 0.9, 0.5, 0.2))
    assert not teacher.pending
    with pytest.raises(KeyError):
        teacher.update(tickets[:1], outcome(1.0))


def test_bad_outcomes_teach_nothing(node: dict[str, Any]) -> None:
    """One warning, however many; an episode that never ends holds nobody up."""
    teacher = made(node)
    _, stuck = teacher.sample(2)
    with pytest.warns(UserWarning, match="not a number"):
        teacher.update(teacher.sample(1)[1], outcome(float("nan")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        teacher.update(teacher.sample(2)[1], outcome(float("nan"), 1.0))
        levels = play(teacher, EPISODES, flight=1).double().numpy()
    assert WORLD.levels.fit(levels).all() and teacher.dropped == 2
    assert set(stuck.tolist()) == set(teacher.pending)
    teacher.update(stuck, outcome(1.0, 0.0))


def test_scores_that_are_all_the_same(node: dict[str, Any]) -> None:
    for score in (0.0, 1.0):
        teacher = made(node)
        for _ in range(6):
            teacher.update(teacher.sample(4)[1], outcome(*[score] * 4))
        assert torch.isfinite(teacher.sample(4)[0]).all()
        assert all(np.isfinite(value) for value in teacher.metrics().values())


def test_a_resumed_teacher_goes_on_exactly(node: dict[str, Any], tmp_path: Path) -> None:
    teacher, resumed = made(node), made(node, seed=5)
    play(teacher, 60)
    file = tmp_path / "state.pt"
    torch.save(pack(teacher.get_state()), file)
    first = play(teacher, 60, seed=1)
    state = unpack(torch.load(file, weights_only=True))
    for _ in range(2):  # the second time: what was saved has not moved
        resumed.set_state(state)
        assert resumed.pending.keys() == state["pending"].keys()
        assert torch.equal(first, play(resumed, 60, seed=1))


def test_the_seed_decides_and_nothing_else(node: dict[str, Any]) -> None:
    seen = []
    for seed, other in ((0, 1), (0, 2), (1, 2)):
        torch.manual_seed(other)
        np.random.seed(other)
        before, legacy = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore
        seen.append(play(made(node, seed), 40))
        assert torch.equal(before, torch.get_rng_state())
        assert np.array_equal(legacy, np.random.get_state()[1])  # type: ignore
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])
