"""Levels: the library's arithmetic by hand, what a score is, who learns from what; learnability."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from embodied.core.build import ConfigError, Node, build
from embodied.core.remembered import pack, unpack
from embodied.envs.maze.env import Config, Maze
from embodied.teachers.levels.plr import AGAIN, EDIT, NEW, LevelBuffer, Plr
from embodied.teachers.levels.sfl import Sfl
from embodied.teachers.teacher import Curriculum, Outcome, StudentEstimates, TaskWrapper
from tests.teachers.place import ended

NODE = {"_target_": "embodied.teachers.levels.plr.Plr", "size": 8, "fill": 0.5, "score": "gain"}


@pytest.fixture(scope="module")
def maze() -> Maze:
    return Maze(Config(side=5, blocks=8, num_envs=3, horizon=6))


def made(maze: Maze, node: Node = NODE, **settings: Any) -> Any:
    return build(node | settings, Curriculum, spec=maze.spec, levels=maze.levels, seed=0)


def outcome(gain: float, ret: float = 0.0, value: float = 0.0, n: int = 1) -> Outcome:
    numbers = (ret, ret > 0, 5.0, gain, 2 * gain, value)
    return Outcome(*(torch.full((n,), float(number)) for number in numbers))


def filled(maze: Maze, count: int = 4, **settings: Any) -> Plr:
    """A teacher with so many levels in its library, scored 0.1, 0.2, ..."""
    teacher = made(maze, **settings)
    for played in range(count):
        teacher.update(teacher.sample(1)[1], outcome(0.1 * (played + 1)))
    return teacher


def library(*scores: float, staleness: float = 0.25, size: int = 4) -> LevelBuffer:
    books = LevelBuffer(size, 1, 0.5, staleness)
    for at, score in enumerate(scores):
        assert books.add(np.array([at / 10]), score, 0.0)
    return books


def bytes_of(levels: Any) -> set[bytes]:
    return {np.asarray(level, np.float32).tobytes() for level in levels}


def test_chances_by_hand() -> None:
    """Scores 0.2, 0.5, 0.1: ranks 2, 1, 3; beta 1/2 weighs them 1/4, 1, 1/9, 49/36 together. After
    two more draws of the first, the others were drawn two draws ago. Of those that are not being
    played (all, if all are) the first and third weigh 4/5 and 1/5."""
    books, random = library(0.2, 0.5, 0.1), np.random.default_rng(0)
    score = np.array([9, 36, 4]) / 49
    np.testing.assert_allclose(books.chances(), 0.75 * score + 0.25 / 3)
    np.testing.assert_allclose(books.chances([0, 1, 2]), books.chances())
    others = 0.75 * np.array([0.8, 0, 0.2]) + 0.25 * np.array([0.5, 0, 0.5])
    np.testing.assert_allclose(books.chances([1]), others)
    assert 1 not in {books.sample(random, [1]) for _ in range(50)}
    books = library(0.2, 0.5, 0.1)
    books.clock, books.drawn[0] = 2, 2
    np.testing.assert_allclose(books.chances(), 0.75 * score + 0.25 * np.array([0, 0.5, 0.5]))
    books = library(0.2, 0.5, 0.1, staleness=0.0)
    counts = np.bincount([books.sample(random) for _ in range(3000)], minlength=3)
    assert books.clock == 3000
    np.testing.assert_allclose(counts / 3000, score, atol=0.03)


def test_parallel_envs_replay_different_levels(maze: Maze) -> None:
    """With beta 0.01 the best level has nearly all the chances; four envs play all four levels."""
    teacher = filled(maze, replay=1.0, beta=0.01, staleness=0.0)
    memos = [teacher.pending[ticket][1] for ticket in teacher.sample(4)[1].tolist()]
    assert {kind for kind, _ in memos} == {AGAIN}
    assert sorted(number for _, number in memos) == [0, 1, 2, 3]


def test_the_least_likely_level_leaves_for_a_better_one() -> None:
    books = library(0.2, 0.5, 0.1, 0.4)
    assert not books.add(np.array([0.9]), 0.1, 0.0)  # not higher than the lowest
    assert books.add(np.array([0.9]), 0.11, 0.7)
    assert books.get(2) is None and books.find(np.array([0.2])) is None
    number = books.find(np.array([0.9]))
    assert number == 4 and books.best_of(number) == 0.7 and len(books) == 4
    books.update_score(2, 9.0, 9.0)  # late news of a level that has left
    assert books.score.max() == 0.5
    # A stale level is likely to be drawn, and stays although its score is the lowest.
    old = library(0.3, 0.1, 0.2, staleness=0.9, size=3)
    old.clock, old.drawn[:] = 10, [10, 0, 10]
    assert old.add(np.array([0.9]), 0.25, 0.0)
    assert old.find(np.array([0.1])) == 1 and old.find(np.array([0.2])) is None


def test_new_levels_until_the_library_is_filled(maze: Maze) -> None:
    teacher = filled(maze, 3, replay=1.0)
    assert not teacher.ready and set(teacher.kinds) == {NEW}
    teacher.update(teacher.sample(1)[1], outcome(0.4))
    assert teacher.ready
    assert bytes_of(teacher.sample(20)[0]) <= bytes_of(teacher.library.level[:4])


def test_only_what_is_played_again_is_learned_from(maze: Maze) -> None:
    """And that as often as asked for."""
    robust, plain = filled(maze, robust=True, replay=0.3), filled(maze)
    _, tickets = robust.sample(1000)
    again = [robust.pending[number][1][0] == AGAIN for number in tickets.tolist()]
    assert robust.trains(tickets).tolist() == again
    assert np.mean(again) == pytest.approx(0.3, abs=0.05)
    assert plain.trains(plain.sample(40)[1]).all()


@pytest.mark.parametrize(
    ("score", "first", "second"),
    [("gain", 0.3, 0.1), ("error", 0.6, 0.2), ("maxmc", 0.5, 0.7 - 0.6)],
)
def test_scores_by_hand(maze: Maze, score: str, first: float, second: float) -> None:
    """An episode that returned 0.7 where the student expected 0.2 on average; then another, and
    worse: the best return is remembered, the newest expectation counts."""
    teacher = made(maze, score=score, replay=1.0, size=1, fill=1.0)
    for told, expected in (
        (outcome(0.3, ret=0.7, value=0.2), first),
        (outcome(0.1, ret=0.0, value=0.6), second),
    ):
        teacher.update(teacher.sample(1)[1], told)
        assert teacher.library.score[0] == pytest.approx(expected, abs=1e-6)
    assert len(teacher.library) == 1


def test_edits_follow_what_was_played_again(maze: Maze) -> None:
    teacher = filled(maze, replay=1.0, robust=True, edits=2)
    parents, tickets = teacher.sample(3)
    assert teacher.trains(tickets).all()
    teacher.update(tickets, outcome(0.5, n=3))
    children, tickets = teacher.sample(3)
    assert not teacher.trains(tickets).any() and list(teacher.kinds)[-3:] == [EDIT] * 3
    assert maze.levels.solvable(children.double().numpy()).all()
    apart = (children != parents).sum(1)
    assert (apart <= 4).all() and apart.sum() > 0  # a goal that moves may take a wall away
    before = len(teacher.library)
    teacher.update(tickets, outcome(0.9, n=3))
    assert len(teacher.library) >= before + 2 and not teacher.queue  # of edits none is made
    assert teacher.taken == len(teacher.library)


def test_new_levels_may_be_the_simplest(maze: Maze) -> None:
    tasks, _ = made(maze, first="plain").sample(20)
    assert not tasks[:, :25].any() and len(tasks.unique(dim=0)) > 10


def test_a_level_that_is_known_is_not_taken_twice(maze: Maze) -> None:
    teacher = filled(maze, 2, replay=0.0)
    level = teacher.library.level[0].copy()
    teacher.learn(level[None], np.array([[0.9, 0.0, 0.0]]), [(NEW, -1)])
    assert len(teacher.library) == 2 and teacher.library.score[0] == 0.9


def test_estimates_are_means_over_the_steps_of_an_episode(maze: Maze) -> None:
    """Two batches, and a resume between; ticket 0 ends in the second, 1 is still running."""
    teacher = made(maze)
    heard: list[Any] = []
    teacher.learn = lambda points, scores, memos: heard.append(scores)  # type: ignore[assignment]
    _, tickets = teacher.sample(2)
    before, parts = StudentEstimates(teacher), StudentEstimates(teacher)
    gains, values = torch.tensor([0.4, -0.2, 9.0]), torch.tensor([0.5, 0.1, 0])
    before.add_steps(torch.tensor([0, 0, 1]), gains, values)
    parts.set_state(unpack(pack(before.get_state())))
    parts.episodes_ended(
        tickets[:1], Outcome(torch.tensor([0.8]), torch.ones(1), torch.tensor([3.0]))
    )
    assert not heard
    parts.add_steps(torch.tensor([1, 0]), torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.9]))
    # gain (0.4 + 0 + 0.5) / 3, return, value (0.5 + 0.1 + 0.9) / 3
    np.testing.assert_allclose(heard, [[[0.3, 0.8, 0.5]]], rtol=1e-6)
    assert teacher.pending.keys() == {1} and parts.sums.keys() == {1} and not parts.ended


def test_an_episode_whose_steps_were_never_told_teaches_nothing(maze: Maze) -> None:
    teacher = made(maze)
    _, tickets = teacher.sample(2)
    parts = StudentEstimates(teacher)
    ends = torch.tensor([0.8, 0.8])
    parts.episodes_ended(tickets, Outcome(ends, ends, ends))
    with pytest.warns(UserWarning, match="is NaN"):
        parts.add_steps(tickets[:1], torch.ones(1), torch.ones(1))
    assert teacher.dropped == 1 and len(teacher.library) == 1


def test_a_world_says_who_learns(maze: Maze) -> None:
    """`learn` belongs to the episode of the step, not to the one that begins after it."""
    teacher = filled(maze, robust=True)
    parts = StudentEstimates(teacher)
    taught = TaskWrapper(maze, teacher, estimates=parts)
    taught.reset(0)
    seen: dict[int, set[bool]] = {}
    for _ in range(60):
        step = taught.step(torch.zeros(3, dtype=torch.int64))
        for ticket, learn in zip(step.log["ticket"], step.log["learn"], strict=True):
            seen.setdefault(int(ticket), set()).add(bool(learn))
        for ticket in step.log["ticket"][step.ended].tolist():
            assert seen[ticket] == {teacher.pending[ticket][1][0] == AGAIN}
    assert {True, False} <= set().union(*seen.values())
    taught.reset()
    assert not parts.ended and len(teacher.pending) == 3


@pytest.mark.parametrize("name", ["domain_randomization", "plr", "accel", "paired", "clutr"])
def test_what_cannot_be_taught_is_refused(name: str, maze: Maze) -> None:
    node = yaml.safe_load(Path(f"configs/teacher/{name}.yaml").read_text())
    small = Maze(Config(side=6, blocks=3))
    for more, context, message in (
        ({}, {"spec": maze.spec}, "needs an environment with levels"),
        ({"box": {"start": [0, 1]}}, {"spec": maze.spec, "levels": maze.levels}, "chosen whole"),
        ({}, {"spec": small.spec, "levels": maze.levels}, "39 elements, a level has 28"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(node | more, Curriculum, seed=0, **context)


def test_what_makes_no_sense_is_refused(maze: Maze) -> None:
    with pytest.raises(ConfigError, match="replay above 0"):
        made(maze, robust=True, replay=0.0)
    with pytest.raises(ConfigError, match=r"size=9 should be at most teacher\.candidates=6"):
        made_sfl(maze, size=9)
    teacher = made(maze)
    with pytest.raises(ConfigError, match="value estimates"):
        teacher.update(teacher.sample(1)[1], ended(1.0))


SFL = {"_target_": "embodied.teachers.levels.sfl.Sfl", "candidates": 6, "plays": 4, "size": 2}
made_sfl = partial(made, node=SFL)


def play(teacher: Sfl, rates: list[float]) -> None:
    """All tests of a round: candidate i wins the share `rates[i]` of its four."""
    wins = [0.0] * 6
    while len(teacher.tested):
        _, ticket = teacher.sample(1)
        place = teacher.pending[int(ticket)][1]
        won = wins[place] < 4 * rates[place]
        wins[place] += won
        teacher.update(ticket, ended(float(won)))


def test_levels_that_are_solved_sometimes_are_kept(maze: Maze) -> None:
    """p (1 - p) of 0, 1/4, 1/2, 3/4, 1 and 0: the largest is at 1/2, then at 1/4."""
    teacher = made_sfl(maze)
    tested = teacher.tested.copy()
    play(teacher, [0.0, 0.25, 0.5, 0.75, 1.0, 0.0])
    assert np.array_equal(teacher.kept, tested[[2, 1]]) and teacher.rounds == 1
    assert teacher.learnability == pytest.approx((0.25 + 0.1875) / 2)
    assert teacher.metrics()["learnability"] == teacher.learnability


def test_tests_are_random_levels_and_the_rest_is_on_kept_levels(maze: Maze) -> None:
    """Interrupted tests are repeated."""
    teacher = made_sfl(maze)
    _, tickets = teacher.sample(7)
    teacher.update(tickets[:2], ended(1.0, 0.0))
    teacher.forget()
    assert len(teacher.waiting) == 22
    _, tickets = teacher.sample(22)
    assert teacher.trains(tickets).all()
    teacher.update(tickets, ended(*[1.0, 0.0] * 11))
    tasks, after = teacher.sample(50)
    assert teacher.trains(after).all() and bytes_of(tasks) == bytes_of(teacher.kept)


def test_published_tests_are_not_trained_on_and_half_of_the_rest_is_kept(maze: Maze) -> None:
    teacher = made_sfl(maze, train_on_tests=False, replay=0.5)
    _, tickets = teacher.sample(24)
    assert not teacher.trains(tickets).any()
    assert sorted(teacher.pending[t][1] for t in tickets.tolist()) == sorted([*range(6)] * 4)
    # The tests are still running: the next episodes are random levels, and trained on.
    assert teacher.trains(teacher.sample(5)[1]).all()
    teacher.update(tickets, ended(*[1.0, 0.0] * 12))
    tasks, after = teacher.sample(400)
    known = bytes_of(teacher.kept)
    share = np.mean([bytes_of([task]) <= known for task in tasks])
    assert len(known) == 2 and teacher.trains(after).all()
    assert share == pytest.approx(0.5, abs=0.08)


def test_a_round_follows_after_so_many_episodes(maze: Maze) -> None:
    teacher = made_sfl(maze, every=10)
    play(teacher, [0.5] * 6)
    _, tickets = teacher.sample(10)
    teacher.update(tickets[:9], ended(*[1.0] * 9))
    assert not len(teacher.tested)
    teacher.update(tickets[9:], ended(1.0))
    assert len(teacher.tested) == 6 and len(teacher.waiting) == 24 and len(teacher.kept) == 2
