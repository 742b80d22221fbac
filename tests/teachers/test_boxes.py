"""Boxes that grow, and learning progress (ALP-GMM, Covar-GMM, RIAC, their mixtures), by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.teachers.tasks.gmm import best, draw, fit, pick, price
from tests.teachers.place import LINE, ended, made, point, rng

ADR = "tasks.adr.Adr"
GROW = "tasks.easy_to_hard.EasyToHard"
ALP, COVAR, RIAC = "tasks.alpgmm.AlpGmm", "tasks.covargmm.CovarGmm", "tasks.riac.Riac"


def played(teacher: Any, *scores: float) -> None:
    """One episode after the other."""
    for score in scores:
        teacher.update(teacher.sample(1)[1], ended(score))


def learned(teacher: Any, where: list[float], memo: Any, *scores: float) -> None:
    for score in scores:
        teacher.learn(np.array([where]), np.array([score]), [memo])


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
    played(teacher, *[0.0] * 4)
    assert teacher.share == pytest.approx(0.6)
    played(teacher, *[0.0] * 10)
    assert teacher.share == 1.0


def test_success_grows_the_box() -> None:
    """Once the last four of 0 0 1 1 1 are good enough in the mean."""
    teacher = made(GROW, width=0.1, step=0.2, window=4, grow=0.75)
    _, before = teacher.sample(4)
    played(teacher, 0.0, 0.0, 1.0, 1.0)
    assert teacher.share == pytest.approx(0.1)
    played(teacher, 1.0)
    assert teacher.share == pytest.approx(0.3)
    teacher.update(before, ended(0.0, 0.0, 0.0, 0.0))  # of the smaller box: they say nothing
    assert teacher.share == pytest.approx(0.3) and not teacher.scored


def test_adr_starts_at_one_task_and_grows_outward() -> None:
    teacher = made(ADR, easy={"x": 0.25}, boundary=1.0, delta=0.1, queue=5)
    assert torch.equal(teacher.sample(20)[0], torch.tensor([[0.25, 0.5]]).expand(20, 2))
    widths = []
    for _ in range(10):
        played(teacher, *[1.0] * 20)
        widths.append(teacher.metrics()["volume"])
    assert widths == sorted(widths) and widths[-1] > 0.1
    played(teacher, *[1.0] * 600)
    assert teacher.bounds.tolist() == [[0.0, 0.0], [1.0, 1.0]]  # not past the box
    played(teacher, *[0.0] * 1000)  # everything forgotten: both meet somewhere
    assert teacher.metrics()["width"] < 0.25 and (teacher.bounds[1] >= teacher.bounds[0]).all()


def test_a_bound_moves_by_its_own_tickets() -> None:
    """Five at the upper bound of x, in the same place as every other task: only that one moves.
    Tickets: side, element, how often the bound had moved."""
    teacher = made(ADR, boundary=0.5, delta=0.1, queue=5, high=0.6)
    middle = [0.5, 0.5]
    learned(teacher, middle, [1, 0, 0], 1.0, 1.0, 1.0, 0.0)
    learned(teacher, middle, None, 1.0)  # the same task, another ticket
    assert teacher.bounds.tolist() == [middle, middle]
    learned(teacher, middle, [1, 0, 0], 0.0)  # mean 0.6
    assert teacher.bounds.tolist() == [middle, [0.6, 0.5]]
    learned(teacher, middle, [1, 0, 0], *[1.0] * 5)  # late ones, of the bound where it was
    assert teacher.bounds.tolist() == [middle, [0.6, 0.5]]
    learned(teacher, [0.6, 0.5], [1, 0, 1], 0.9, 0.1, 0.9, 0.1, 0.5)  # between the thresholds
    assert teacher.bounds.tolist() == [middle, [0.6, 0.5]] and teacher.queues[1][0] == []
    learned(teacher, [0.6, 0.5], [1, 0, 1], *[0.1] * 5)  # mean <= low: back
    assert teacher.bounds.tolist() == [middle, middle]
    learned(teacher, middle, [1, 0, 2], *[0.0] * 5)  # and no further than the opposite bound
    assert teacher.bounds.tolist() == [middle, middle]


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        (GROW, {"easy": {"z": 0.1}}, '"z" is no task parameter'),
        (ADR, {"easy": {"x": 0.9}, "box": {"x": [0.0, 0.5]}}, "outside its box"),
        (ADR, {"low": 0.9}, "low < high"),
        (ALP, {"every": 3}, "two episodes a component"),
        (RIAC, {"random": 0.95}, "random \\+ mutated"),
    ],
)
def test_settings_that_cannot_be(target: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(target, **settings)


def test_progress_is_the_difference_to_the_nearest_task() -> None:
    teacher = made(ALP)
    for i in range(5):
        teacher.row(point(0.1 * i, 0.0), 0.1 * i)
    assert teacher.progress(point(0.21, 0.0), 0.9) == 0  # five tasks are not yet enough
    teacher.row(point(0.5, 0.0), 0.5)
    assert teacher.row(point(0.21, 0.0), 0.9) == pytest.approx([0.21, 0.0, 0.7])
    # Now (0.21, 0) itself, with 0.9, is nearer than (0.2, 0), with 0.2.
    assert teacher.progress(point(0.22, 0.0), 0.4) == pytest.approx(0.5)
    assert teacher.progress(point(0.4, 0.3), 0.1) == pytest.approx(0.3)


def test_a_limited_memory_forgets_the_oldest() -> None:
    """Of tasks as near the newest is compared with."""
    teacher, unlimited = made(ALP, memory=6), made(ALP, memory=0)
    for i in range(8):  # 0 and 1 are forgotten; 6 and 7 lie where those were
        teacher.keep(point(0.1 * i, 0.0), 0.1 * i)
    assert teacher.progress(point(0.0, 0.0), 0.0) == pytest.approx(0.2)
    for each in (teacher, unlimited):
        for i in range(8):
            each.keep(point(0.5, 0.5), 0.01 * i)
        assert each.progress(point(0.5, 0.5), 0.17) == pytest.approx(0.1)
    for i in range(200):  # the arrays grow
        unlimited.keep(point(i / 200, 0.0), i / 200)
    assert unlimited.progress(point(0.0, 0.0), 0.0) == 0


def test_components_are_drawn_by_their_progress_not_by_their_weight() -> None:
    """Beside random tasks of the whole box."""
    teacher = made(ALP, random=0.2)
    cov = np.repeat(1e-8 * np.eye(3)[None], 3, 0)
    mean = np.array([[0.1, 0.1, 0.0], [0.5, 0.5, 0.1], [0.9, 0.9, 0.3]])
    teacher.mixture = {"weight": np.array([0.9, 0.05, 0.05]), "mean": mean, "cov": cov}
    teacher.utility = teacher.worth(teacher.mixture).tolist()
    drawn = np.array([task for task, _ in teacher.propose(4000)])
    near = np.abs(drawn[:, None] - mean[:, :2]).max(2) < 0.01
    assert near.mean(0) == pytest.approx([0, 0.2, 0.6], abs=0.03)
    assert (~near.any(1)).mean() == pytest.approx(0.2, abs=0.025)


def test_pick_without_any_weight_is_uniform() -> None:
    random = rng(0)
    counts = np.bincount([pick([0.0, 0.0, 0.0], random) for _ in range(3000)], minlength=3)
    assert counts / 3000 == pytest.approx([1 / 3] * 3, abs=0.04)


def test_fits_use_the_last_window_only() -> None:
    """Windows of 40: the first one is dull, the second lively on the right."""
    teacher, random = made(ALP, every=40, most=3, random=0.0), rng(1)
    for turn in range(80):
        x, y = random.random(2)
        learned(teacher, [x, y], None, float(turn % 2) if turn >= 40 and x > 0.5 else 0.0)
        if turn == 39:
            assert teacher.fits == 1 and sum(teacher.utility) == pytest.approx(0, abs=1e-6)
    assert teacher.fits == 2 and not teacher.rows
    assert np.mean([each[0] for each, _ in teacher.propose(200)]) > 0.6


def test_covariance_of_time_and_score() -> None:
    teacher = made(COVAR, every=10)
    assert teacher.row(point(0.1, 0.2), 0.7) == [0.1, 0.2, 0.0, 0.7]
    teacher.rows = [[0.0] * 4] * 3
    assert teacher.row(point(0.1, 0.2), 0.7) == [0.1, 0.2, 0.3, 0.7]
    cov = np.zeros((2, 4, 4))
    cov[0, 2, 3], cov[1, 2, 3] = 0.04, -0.06
    mixture = {"weight": np.ones(2) / 2, "mean": np.zeros((2, 4)), "cov": cov}
    assert teacher.worth(mixture).tolist() == [0.04, 0.0]


def test_riac_progress_is_between_halves_and_scores_a_cut() -> None:
    """Of the last four scores |0.1 - 0.8|. Below: 4 rows, progress 1; above: 3 rows, progress
    0.25 -> 4 * 3 * 0.75."""
    teacher = made(RIAC, window=4)
    for scores, progress in (
        ((9.0, 0.0, 0.2, 0.6, 1.0), 0.7),
        ((9.0, 0.0), 0.0),
        ((0.0, 0.5, 0.1), 0.3),
    ):
        assert teacher.progress([[0.5, 0.5, s] for s in scores]) == pytest.approx(progress)
    below = [[0.1, 0.0, s] for s in (0.0, 0.0, 1.0, 1.0)]
    above = [[0.9, 0.0, s] for s in (0.5, 0.25, 0.25)]
    assert made(RIAC).score(below, above) == pytest.approx(9.0)


def test_riac_cuts_where_progress_differs() -> None:
    """Scores rise for x > 0.6 only: the first cut is near 0.6, in x, with the parts' progress."""
    teacher, random = made(RIAC, most=200, attempts=300), rng(2)
    for turn in range(201):
        x, y = random.random(2)
        learned(teacher, [x, y], None, turn / 200 if x > 0.6 else 0.3)
    root, left, right = teacher.regions
    element, threshold, below, above = root["cut"]
    assert element == 0 and threshold == pytest.approx(0.6, abs=0.06) and (below, above) == (1, 2)
    assert right["alp"] > 0.4 > 0.1 > left["alp"]
    assert left["high"] == [threshold, 1.0] and right["low"] == [threshold, 0.0]
    assert len(left["rows"]) + len(right["rows"]) == 201
    more = len(right["rows"]) + 1
    learned(teacher, [0.9, 0.5], None, 1.0)
    assert len(teacher.regions[2]["rows"]) == more and len(root["rows"]) == 201


def test_riac_forgets_where_no_cut_is_valid() -> None:
    """All tasks in one place: no cut leaves enough on both sides, a quarter goes."""
    teacher = made(RIAC, most=40, fewest=5)
    learned(teacher, [0.5, 0.5], None, *[1.0] * 41)
    assert len(teacher.regions) == 1 and len(teacher.regions[0]["rows"]) == 41 - 10


def test_riac_samples_as_its_shares_say() -> None:
    teacher = made(RIAC, spec=LINE, random=0.2, mutated=0.1, mutation=0.001)
    rows = [[0.93, 0.1], [0.97, 0.9]]
    teacher.regions = [
        {"low": [0.0], "high": [1.0], "rows": [], "alp": 0.0, "cut": [0, 0.9, 1, 2]},
        {"low": [0.0], "high": [0.9], "rows": [], "alp": 0.0, "cut": None},
        {"low": [0.9], "high": [1.0], "rows": rows, "alp": 0.5, "cut": None},
    ]
    drawn = np.array([each[0] for each, _ in teacher.propose(5000)])
    assert np.mean(drawn < 0.9) == pytest.approx(0.2 * 0.9, abs=0.02)
    near_worst = np.mean(abs(drawn - 0.93) < 0.004)
    assert near_worst == pytest.approx(0.1 + 0.008 * (7 + 0.2), abs=0.02)


def test_one_component_is_the_sample_mean_and_covariance() -> None:
    """K = 2, D = 3: 1 + 6 + 12 = 19 free numbers; AIC = 38 - 2 log L."""
    assert price(2, 3, -10.0) == 58.0
    rows = rng().normal(size=(200, 2)) @ np.array([[1.0, 0.4], [0.0, 0.5]]) + 3
    ((mixture, likelihood),) = fit(rows, [1], rng())
    assert mixture["mean"][0] == pytest.approx(rows.mean(0))
    cov = np.cov(rows.T, bias=True) + 1e-6 * np.eye(2)
    assert mixture["cov"][0] == pytest.approx(cov)
    off = rows - rows.mean(0)
    each = -0.5 * np.einsum("ni,ij,nj->n", off, np.linalg.inv(cov), off)
    assert likelihood == pytest.approx(each.sum() - 100 * math.log(np.linalg.det(2 * np.pi * cov)))


def test_three_clusters_are_three() -> None:
    centres = np.array([[0.1, 0.1], [0.9, 0.1], [0.5, 0.9]])
    rows = np.concatenate([c + 0.03 * rng(i).normal(size=(80, 2)) for i, c in enumerate(centres)])
    found = best(rows, range(1, 7), rng())
    assert found is not None and len(found["weight"]) == 3
    order = np.argsort(found["mean"] @ [1.0, 10.0])
    assert found["mean"][order] == pytest.approx(centres, abs=0.02)
    assert found["weight"].sum() == pytest.approx(1)


def test_rows_that_coincide_and_too_few_rows() -> None:
    found = best(np.full((40, 2), 0.5), range(2, 6), rng())
    assert found is not None and np.isfinite(found["cov"]).all()
    assert draw(found, 0, 2, rng()) == pytest.approx([0.5, 0.5], abs=0.01)
    assert best(np.zeros((3, 2)), range(2, 6), rng()) is None


def test_a_component_without_a_row_is_no_component() -> None:
    rows = np.repeat([[0.4, 0.6], [0.8, 0.2]], 10, axis=0)
    for mixture, likelihood in fit(rows, [2, 5], rng()):
        assert np.isfinite(likelihood) and (mixture["weight"] > 0).all()
        gap = np.abs(mixture["mean"][:, None] - rows[[0, 10]]).sum(2).min(1)
        assert gap.max() < 1e-6, "each lies where rows are"


def test_draws_are_of_the_component() -> None:
    cov = np.array([[[0.04, 0.03, 0.0], [0.03, 0.09, 0.0], [0.0, 0.0, 1.0]]])
    mixture = {"weight": np.ones(1), "mean": np.array([[1.0, 2.0, 3.0]]), "cov": cov}
    random = rng()
    drawn = np.stack([draw(mixture, 0, 2, random) for _ in range(4000)])
    assert drawn.mean(0) == pytest.approx([1, 2], abs=0.02)
    assert np.cov(drawn.T) == pytest.approx(cov[0, :2, :2], abs=0.006)
