"""ALP-GMM, Covar-GMM and RIAC by hand: what counts as progress, and what is done with it."""

from __future__ import annotations

import numpy as np
import pytest

from embodied.core.build import ConfigError
from embodied.teachers.tasks.learning_progress import pick
from tests.teachers.place import LINE, made, point

ALP, COVAR, RIAC = (f"tasks.learning_progress.{name}" for name in ("AlpGmm", "CovarGmm", "Riac"))


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


def test_of_tasks_as_near_the_newest_is_compared_with() -> None:
    for memory in (0, 8):
        teacher = made(ALP, memory=memory)
        for score in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5):
            teacher.keep(point(0.5, 0.5), score)
        assert teacher.progress(point(0.5, 0.5), 0.6) == pytest.approx(0.1)


def test_a_limited_memory_forgets_the_oldest() -> None:
    teacher = made(ALP, memory=6)
    for i in range(8):  # 0 and 1 are forgotten; 6 and 7 lie where those were
        teacher.keep(point(0.1 * i, 0.0), 0.1 * i)
    assert teacher.progress(point(0.0, 0.0), 0.0) == pytest.approx(0.2)
    for i in range(8):
        teacher.keep(point(0.5, 0.5), 0.01 * i)
    assert teacher.progress(point(0.5, 0.5), 0.07) == pytest.approx(0.0)
    unlimited = made(ALP, memory=0)
    for i in range(200):  # the arrays grow
        unlimited.keep(point(i / 200, 0.0), i / 200)
    assert unlimited.progress(point(0.0, 0.0), 0.0) == 0


def test_components_are_drawn_by_their_progress_not_by_their_weight() -> None:
    teacher = made(ALP, random=0.0)
    cov = np.repeat(1e-6 * np.eye(3)[None], 3, 0)
    mean = np.array([[0.1, 0.1, 0.0], [0.5, 0.5, 0.1], [0.9, 0.9, 0.3]])
    teacher.mixture = {"weight": np.array([0.9, 0.05, 0.05]), "mean": mean, "cov": cov}
    teacher.utility = teacher.worth(teacher.mixture).tolist()
    components = np.array([memo for _, memo in teacher.propose(4000)])
    shares = np.bincount(components, minlength=3) / 4000
    assert shares == pytest.approx([0, 0.25, 0.75], abs=0.03)


def test_random_tasks_are_of_the_whole_box() -> None:
    teacher = made(ALP, random=0.2)
    teacher.mixture = {
        "weight": np.ones(1), "mean": np.array([[0.5, 0.5, 0.2]]), "cov": 1e-8 * np.eye(3)[None],
    }  # fmt: skip
    teacher.utility = [0.2]
    away = [abs(each[0] - 0.5) > 0.01 for each, _ in teacher.propose(3000)]
    assert np.mean(away) == pytest.approx(0.2 * 0.98, abs=0.025)


def test_pick_without_any_weight_is_uniform() -> None:
    random = np.random.Generator(np.random.PCG64(0))
    counts = np.bincount([pick([0.0, 0.0, 0.0], random) for _ in range(3000)], minlength=3)
    assert counts / 3000 == pytest.approx([1 / 3] * 3, abs=0.04)


def test_fits_use_the_last_window_only() -> None:
    """Windows of 40: the first one is dull, the second lively on the right."""
    teacher = made(ALP, every=40, most=3, random=0.0)
    random = np.random.Generator(np.random.PCG64(1))
    for turn in range(80):
        where = random.random(2)
        score = float(turn % 2) if turn >= 40 and where[0] > 0.5 else 0.0
        teacher.learn(where[None], np.array([score]), [None])
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
    absolute = made(COVAR, every=10, absolute=True)
    assert absolute.worth(mixture).tolist() == [0.04, 0.06]


def test_riac_progress_is_between_halves() -> None:
    teacher = made(RIAC, window=4)
    scores = [9.0, 0.0, 0.2, 0.6, 1.0]  # the last four: |0.1 - 0.8|
    assert teacher.progress([[0.5, 0.5, s] for s in scores]) == pytest.approx(0.7)
    assert teacher.progress([[0.5, 0.5, s] for s in scores[:2]]) == 0
    assert teacher.progress([[0.5, 0.5, s] for s in (0.0, 0.5, 0.1)]) == pytest.approx(0.3)


def test_riac_scores_a_cut_by_sizes_and_difference() -> None:
    """Below: 4 rows, progress 1; above: 3 rows, progress 0.25 -> 4 * 3 * 0.75; legacy 0.75."""
    below = [[0.1, 0.0, s] for s in (0.0, 0.0, 1.0, 1.0)]
    above = [[0.9, 0.0, s] for s in (0.5, 0.25, 0.25)]
    assert made(RIAC).score(below, above) == pytest.approx(9.0)
    assert made(RIAC, legacy_score=True).score(below, above) == pytest.approx(0.75)


def test_riac_cuts_where_progress_differs() -> None:
    """Scores rise for x > 0.6 only: the first cut is near 0.6, in x, with the parts' progress."""
    teacher = made(RIAC, most=200, attempts=300)
    random = np.random.Generator(np.random.PCG64(2))
    for turn in range(201):
        where = random.random(2)
        score = turn / 200 if where[0] > 0.6 else 0.3
        teacher.learn(where[None], np.array([score]), [None])
    root, left, right = teacher.regions
    element, threshold, below, above = root["cut"]
    assert element == 0 and threshold == pytest.approx(0.6, abs=0.06) and (below, above) == (1, 2)
    assert right["alp"] > 0.4 > 0.1 > left["alp"]
    assert left["high"] == [threshold, 1.0] and right["low"] == [threshold, 0.0]
    assert len(left["rows"]) + len(right["rows"]) == 201
    teacher.learn(np.array([[0.9, 0.5]]), np.array([1.0]), [None])
    assert len(right["rows"]) == len(teacher.regions[2]["rows"]) and len(root["rows"]) == 201


def test_riac_forgets_where_no_cut_is_valid() -> None:
    """All tasks in one place: no cut leaves enough on both sides, a quarter goes."""
    teacher = made(RIAC, most=40, fewest=5)
    for _ in range(41):
        teacher.learn(np.array([[0.5, 0.5]]), np.array([1.0]), [None])
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


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        (ALP, {"every": 3}, "two episodes a component"),
        (RIAC, {"random": 0.95}, "random \\+ mutated"),
    ],
)
def test_settings_that_cannot_be(target: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(target, **settings)
