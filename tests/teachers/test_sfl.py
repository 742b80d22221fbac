"""Sampling for learnability: which levels are kept, by hand; what is trained on; resuming."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.state_codec import pack, unpack
from embodied.envs.maze.env import Config, Maze
from embodied.teachers.levels.replay import Sfl
from embodied.teachers.teacher import Curriculum, Outcome

NODE = {"_target_": "embodied.teachers.levels.replay.Sfl", "candidates": 6, "plays": 4, "size": 2}


@pytest.fixture(scope="module")
def maze() -> Maze:
    return Maze(Config(side=5, blocks=8, num_envs=3, horizon=6))


def made(maze: Maze, seed: int = 0, **settings: Any) -> Sfl:
    node = NODE | settings
    return build(node, Curriculum, spec=maze.spec, levels=maze.levels, seed=seed)


def ended(won: list[float]) -> Outcome:
    value = torch.tensor(won)
    return Outcome(value, value, torch.ones(len(won)))


def play(teacher: Sfl, rates: list[float]) -> None:
    """All tests of a round: candidate i wins the share `rates[i]` of its four."""
    wins = dict.fromkeys(range(6), 0.0)
    while len(teacher.tested):
        _, ticket = teacher.sample(1)
        place = teacher.pending[int(ticket)][1]
        won = wins[place] < 4 * rates[place]
        wins[place] += won
        teacher.update(ticket, ended([float(won)]))


def test_levels_that_are_solved_sometimes_are_kept(maze: Maze) -> None:
    """p (1 - p) of 0, 1/4, 1/2, 3/4, 1 and 0: the largest is at 1/2, then at 1/4."""
    teacher = made(maze)
    tested = teacher.tested.copy()
    play(teacher, [0.0, 0.25, 0.5, 0.75, 1.0, 0.0])
    assert np.array_equal(teacher.kept, tested[[2, 1]]) and teacher.rounds == 1
    assert teacher.learnability == pytest.approx((0.25 + 0.1875) / 2)
    assert teacher.metrics()["learnability"] == teacher.learnability


def test_tests_are_random_levels_and_the_rest_is_on_kept_levels(maze: Maze) -> None:
    teacher = made(maze)
    _, tickets = teacher.sample(24)
    assert teacher.trains(tickets).all()
    teacher.update(tickets, ended([1.0, 0.0] * 12))
    tasks, after = teacher.sample(50)
    known = {level.astype(np.float32).tobytes() for level in teacher.kept}
    assert teacher.trains(after).all() and {task.numpy().tobytes() for task in tasks} == known


def test_published_tests_are_not_trained_on_and_half_of_the_rest_is_kept(maze: Maze) -> None:
    teacher = made(maze, train_on_tests=False, replay=0.5)
    _, tickets = teacher.sample(24)
    assert not teacher.trains(tickets).any()
    assert sorted(teacher.pending[t][1] for t in tickets.tolist()) == sorted([*range(6)] * 4)
    # The tests are still running: the next episodes are random levels, and trained on.
    _, more = teacher.sample(5)
    assert teacher.trains(more).all()
    teacher.update(tickets, ended([1.0, 0.0] * 12))
    assert len(teacher.kept) == 2
    tasks, after = teacher.sample(400)
    known = {level.astype(np.float32).tobytes() for level in teacher.kept}
    share = np.mean([task.numpy().tobytes() in known for task in tasks])
    assert teacher.trains(after).all() and share == pytest.approx(0.5, abs=0.08)


def test_a_round_follows_after_so_many_episodes(maze: Maze) -> None:
    teacher = made(maze, every=10)
    play(teacher, [0.5] * 6)
    _, tickets = teacher.sample(10)
    teacher.update(tickets[:9], ended([1.0] * 9))
    assert not len(teacher.tested)
    teacher.update(tickets[9:], ended([1.0]))
    assert len(teacher.tested) == 6 and len(teacher.waiting) == 24 and len(teacher.kept) == 2


def test_interrupted_tests_are_repeated_and_a_resumed_teacher_continues(maze: Maze) -> None:
    teacher, other = made(maze), made(maze, seed=4)
    _, tickets = teacher.sample(7)
    teacher.update(tickets[:2], ended([1.0, 0.0]))
    other.set_state(unpack(pack(teacher.get_state())))
    for each in (teacher, other):
        each.forget()
        assert len(each.waiting) == 22
    for _ in range(40):
        tasks = []
        for each in (teacher, other):
            task, ticket = each.sample(1)
            each.update(ticket, ended([float(task.sum()) % 1 > 0.5]))
            tasks.append(task)
        assert torch.equal(*tasks)
    assert teacher.rounds == other.rounds == 1


def test_bad_settings_are_one_line(maze: Maze) -> None:
    with pytest.raises(ConfigError, match=r"size=9 should be at most teacher\.candidates=6"):
        made(maze, size=9)
