"""The picture of where a teacher sampled: quarters, densities and successes by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embodied.core.build import ConfigError
from embodied.teachers.plots.task_density import CELLS, density, draw, quarters, success


def test_quarters_are_of_the_time_not_of_the_episodes() -> None:
    parts = quarters(np.array([0.0, 1.0, 2.0, 30.0, 55.0, 100.0]))
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3], [4], [5]]
    assert [len(part) for part in quarters(np.array([7.0]))] == [1, 0, 0, 0]


def test_density_is_against_uniform() -> None:
    """All in the lower left quarter: four times uniform there, none at the other end."""
    random = np.random.default_rng(0)
    x, y = random.random((2, 40_000)) / 2
    dense = density(x, y)
    assert dense.shape == (CELLS, CELLS) and dense.mean() == pytest.approx(1)
    assert dense[:15, :15].mean() == pytest.approx(4, rel=0.1) and dense[30:, 30:].max() < 1e-9
    assert density(x + 0.5, y)[5, 30] > 1 > density(x + 0.5, y)[30, 5]  # rows are y
    assert density(np.array([]), np.array([])).sum() == 0


def test_success_is_the_mean_around() -> None:
    random = np.random.default_rng(0)
    x, y = random.random((2, 20_000))
    won = success(x, y, (x < 0.5).astype(float))
    assert won[20, 5] == pytest.approx(1, abs=1e-6) and won[20, 35] == pytest.approx(0, abs=1e-6)
    assert won[20, 19] > 0.5 > won[20, 20]
    assert np.isnan(success(x / 4, y / 4, x)[35, 35])
    assert np.isfinite(success(x, y, np.where(x < 0.5, np.nan, 1.0))).any()


@pytest.mark.parametrize("d", [1, 3])
def test_a_png_for_people(d: int, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    points, scores = random.random((300, d)), random.random(300)
    scores[:10] = np.nan
    names = ("goal_x", "goal_y", "goal_z")[:d]
    file = draw(tmp_path / "a" / "tasks.png", np.arange(300.0), points, scores, names, (0, d - 1))
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and file.stat().st_size > 5000


def test_no_episode_is_said_in_a_line(tmp_path: Path) -> None:
    none = np.empty((0, 2))
    with pytest.raises(ConfigError, match="no episode has finished"):
        draw(tmp_path / "tasks.png", none[:, 0], none, none[:, 0], ("x", "y"))
