"""Mazes in words and back: by hand, always with a way, and what cannot be put is not put."""

from __future__ import annotations

import numpy as np
import pytest

from embodied.envs.maze.levels import MazeLevels, Plans, spell


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def space() -> MazeLevels:
    return MazeLevels(5, 8)


def level(space: MazeLevels, walls: list[int], start: int, goal: int) -> np.ndarray:
    plan = np.zeros(25, bool)
    plan[walls] = True
    at = (np.array([value]) for value in (start, goal, 0))
    return space.encode(Plans(plan.reshape(1, 5, 5), *at))


def test_words_by_hand(space: MazeLevels) -> None:
    """Goal, start, walls in rising order, then nothing (25)."""
    words = space.spell(level(space, [13, 2, 7], start=20, goal=4))
    assert words.tolist() == [[4, 20, 2, 7, 13, 25, 25, 25, 25, 25]]
    assert (space.words, space.length, space.marks) == (26, 10, 2)
    crowded = space.decode(level(space, list(range(5, 20)), 0, 1))
    assert spell(crowded, 10).tolist() == [[1, 0, 5, 6, 7, 8, 9, 10, 11, 12]]


def test_there_and_back(space: MazeLevels) -> None:
    """Everything but which way one looks at first."""
    levels = space.random(200, rng())
    again = space.built(space.spell(levels), rng(1))
    assert np.array_equal(again[:, :-1], levels[:, :-1])
    assert len(np.unique(again[:, -1])) == 4


def test_any_words_are_a_level_with_a_way(space: MazeLevels) -> None:
    words = rng().integers(26, size=(500, 10))
    levels = space.built(words, rng(1))
    assert space.fit(levels).all() and len(np.unique(levels, axis=0)) > 490


def test_the_wall_that_would_close_the_way_is_not_put(space: MazeLevels) -> None:
    """Start in a corner, walls on both sides of it: the second of them is left out."""
    words = np.array([[24, 0, 1, 5, 12, 25, 25, 25, 25, 25]])
    assert np.flatnonzero(space.built(words, rng())[0, :25]).tolist() == [1, 12]
    words = np.array([[24, 0, 5, 1, 12, 25, 25, 25, 25, 25]])
    assert np.flatnonzero(space.built(words, rng())[0, :25]).tolist() == [5, 12]


def test_walls_twice_or_on_start_and_goal_are_nothing(space: MazeLevels) -> None:
    words = np.array([[24, 0, 12, 12, 0, 24, 12, 25, 25, 25]])
    plans = space.decode(space.built(words, rng()))
    assert np.flatnonzero(plans.walls[0]).tolist() == [12]
    assert plans.goal[0] == 24 and plans.start[0] == 0
    same = space.decode(space.built(np.array([[3, 3] + [25] * 8]), rng()))
    assert same.start[0] == 3 and same.goal[0] == 4


def test_a_held_out_maze_is_never_built(space: MazeLevels) -> None:
    levels = space.built(space.spell(space.held_out), rng())
    assert space.fit(levels).all()
