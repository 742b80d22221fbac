"""Boxes that grow: by schedule, by success, and each bound by its own tickets (ADR)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from tests.teachers.place import ended, made

ADR = "tasks.boxes.Adr"
GROW = "tasks.boxes.EasyToHard"


def test_the_box_around_the_easy_task() -> None:
    """Easy (0.5, 0): at share 0.2 it is [0.4, 0.6] x [0, 0.2]."""
    teacher = made(GROW, easy={"x": 0.5}, width=0.2)
    low, high = teacher.bounds()
    assert low.tolist() == pytest.approx([0.4, 0.0]) and high.tolist() == pytest.approx([0.6, 0.2])
    tasks, _ = teacher.sample(500)
    assert (tasks >= torch.tensor(low)).all() and (tasks <= torch.tensor(high)).all()
    assert tasks.amax(0).tolist() == pytest.approx([0.6, 0.2], abs=0.01)


def test_a_schedule_counts_episodes() -> None:
    teacher = made(GROW, pace="schedule", width=0.2, episodes=8)
    for _ in range(4):
        teacher.update(teacher.sample(1)[1], ended(0.0))
    assert teacher.share == pytest.approx(0.6)
    for _ in range(10):
        teacher.update(teacher.sample(1)[1], ended(0.0))
    assert teacher.share == 1.0


def test_success_grows_the_box_and_failure_shrinks_it() -> None:
    teacher = made(GROW, width=0.1, step=0.2, window=4, grow=0.75, shrink=0.5)
    _, before = teacher.sample(4)
    for score in (0.0, 1.0, 1.0, 1.0):
        teacher.update(teacher.sample(1)[1], ended(score))
    assert teacher.share == pytest.approx(0.3)
    teacher.update(before, ended(0.0, 0.0, 0.0, 0.0))  # of the smaller box: they say nothing
    assert teacher.share == pytest.approx(0.3) and not teacher.scored
    for score in (0.0, 1.0, 0.0, 0.0):
        teacher.update(teacher.sample(1)[1], ended(score))
    assert teacher.share == pytest.approx(0.1)


def test_a_window_slides_until_it_is_good_enough() -> None:
    """0 1 1 1 with window 3 and grow 1: the last three do."""
    teacher = made(GROW, width=0.5, step=0.25, window=3, grow=1.0)
    for score, share in ((0.0, 0.5), (1.0, 0.5), (1.0, 0.5), (1.0, 0.75)):
        teacher.update(teacher.sample(1)[1], ended(score))
        assert teacher.share == share


def played_at_bounds(teacher: object, score: float, n: int = 200) -> None:
    for _ in range(n):
        teacher.update(teacher.sample(1)[1], ended(score))  # type: ignore[attr-defined]


def test_adr_starts_at_one_task_and_grows_outward() -> None:
    teacher = made(ADR, easy={"x": 0.25}, boundary=1.0, delta=0.1, queue=5)
    assert torch.equal(teacher.sample(20)[0], torch.tensor([[0.25, 0.5]]).expand(20, 2))
    widths = []
    for _ in range(10):
        played_at_bounds(teacher, 1.0, 20)
        widths.append(teacher.metrics()["volume"])
    assert widths == sorted(widths) and widths[-1] > 0.1
    played_at_bounds(teacher, 1.0, 600)
    assert teacher.bounds.tolist() == [[0.0, 0.0], [1.0, 1.0]]  # not past the box
    played_at_bounds(teacher, 0.0, 1000)  # everything forgotten: both meet somewhere
    assert teacher.metrics()["width"] < 0.25 and (teacher.bounds[1] >= teacher.bounds[0]).all()


def test_a_bound_moves_by_its_own_tickets() -> None:
    """Five at the upper bound of x, in the same place as every other task: only that one moves."""
    teacher = made(ADR, boundary=0.5, delta=0.1, queue=5, high=0.6)
    upper_x = [1, 0, 0]  # side, element, moved so far
    for score in (1.0, 1.0, 1.0, 0.0):
        teacher.learn(np.array([[0.5, 0.5]]), np.array([score]), [upper_x])
    teacher.learn(np.array([[0.5, 0.5]]), np.array([1.0]), [None])  # the same task, another ticket
    assert teacher.bounds.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    teacher.learn(np.array([[0.5, 0.5]]), np.array([0.0]), [upper_x])  # mean 0.6
    assert teacher.bounds.tolist() == [[0.5, 0.5], [0.6, 0.5]]
    for _ in range(5):  # late ones, of the bound where it was
        teacher.learn(np.array([[0.5, 0.5]]), np.array([1.0]), [upper_x])
    assert teacher.bounds.tolist() == [[0.5, 0.5], [0.6, 0.5]]
    for _ in range(5):
        teacher.learn(np.array([[0.6, 0.5]]), np.array([0.1]), [[1, 0, 1]])  # mean <= low: back
    assert teacher.bounds.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    for _ in range(5):  # and no further than the opposite bound
        teacher.learn(np.array([[0.5, 0.5]]), np.array([0.0]), [[1, 0, 2]])
    assert teacher.bounds.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_a_mean_between_the_thresholds_moves_nothing_and_clears_the_queue() -> None:
    teacher = made(ADR, queue=2)
    for score in (1.0, 0.0):
        teacher.learn(np.array([[0.5, 0.5]]), np.array([score]), [[0, 1, 0]])
    assert teacher.bounds[0, 1] == 0.5 and teacher.queues[0][1] == []


def test_bounds_that_reached_the_box_may_be_left_alone() -> None:
    for skip, count in ((False, 4), (True, 2)):
        teacher = made(ADR, skip_reached=skip)
        teacher.bounds = np.array([[0.0, 0.2], [1.0, 0.8]])
        assert len(teacher.tried()) == count


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        (GROW, {"easy": {"z": 0.1}}, '"z" is no task parameter'),
        (ADR, {"easy": {"x": 0.9}, "box": {"x": [0.0, 0.5]}}, "outside its box"),
        (ADR, {"low": 0.9}, "low < high"),
        (GROW, {"shrink": 0.8}, "shrink < grow"),
    ],
)
def test_settings_that_cannot_be(target: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(target, **settings)
