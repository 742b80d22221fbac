"""The toy student by hand, and that teachers do on it what they are for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.teachers.students.toy_student import Config, Student, main, read, shuffled, turned


def student(**settings: object) -> Student:
    return Student(Config(**settings))  # type: ignore[arg-type]


def play(one: Student, x: float, y: float, times: int = 1) -> float:
    return float(one.play(torch.tensor([[x, y]]).repeat(times, 1)).ret[-1])


def test_cells_open_from_the_corner_one_after_the_other() -> None:
    """The corner always teaches; its neighbours from 75 on, the diagonal one too."""
    one = student(cells=10)
    assert play(one, 0.15, 0.05) == 0
    assert play(one, 0.05, 0.05, 74) == pytest.approx(0.74)
    assert play(one, 0.15, 0.05) == 0
    assert play(one, 0.05, 0.05) == pytest.approx(0.75)
    assert play(one, 0.15, 0.05) == pytest.approx(0.01)
    assert play(one, 0.15, 0.15) == pytest.approx(0.01)
    assert play(one, 0.25, 0.05) == 0 and one.unlocked() == 0
    assert play(one, 0.05, 0.05) == pytest.approx(0.76) and one.unlocked() == 0.01
    assert play(one, 0.05, 0.05, 40) == 1.0  # and not more


def test_success_from_half_of_it() -> None:
    one = student()
    outcome = one.play(torch.zeros(60, 2))
    assert outcome.success.sum() == 11 and outcome.success[49] == 1 and outcome.success[48] == 0
    assert one.tests(np.array([[0.0, 0.0], [0.9, 0.9]])).tolist() == [0.6, 0.0]


def test_variants() -> None:
    """Useless elements, noise on returns, and a quadrant that is forgotten."""
    assert student(useless=2).spec.task.size == 4  # type: ignore[union-attr]
    noisy = student(noise=0.3).play(torch.full((4000, 2), 0.95)).ret
    assert float(noisy.std()) == pytest.approx(0.3, abs=0.02) and abs(float(noisy.mean())) < 0.02
    forgetful = student(cells=4, forget=50)
    forgetful.competence[:] = 90
    play(forgetful, 0.9, 0.9, 51)
    assert (forgetful.competence == 0).sum() == 4


def test_a_quarter_turn_moves_the_corner() -> None:
    """(x, y) -> (y, 1 - x): the easy corner is at (1, 0); four turns are none."""
    assert turned(np.array([1.0, 0.0]), 1) == pytest.approx([0, 0])
    assert turned(np.array([0.2, 0.7]), 4) == pytest.approx([0.2, 0.7])
    assert play(student(turn=1), 0.95, 0.05) == pytest.approx(0.01)


def final(folder: Path, *words: str) -> float:
    rows = (main([*words, f"out={folder}"]) / "metrics.jsonl").read_text().splitlines()
    return json.loads(rows[-1])["eval/unlocked"]


def test_rugged_pieces_are_moved_as_wholes() -> None:
    """Every cell is still there once, neighbours within a piece stay so, across pieces not all."""
    assert [shuffled(x, [2, 0, 1]) for x in (0.0, 0.1, 0.5, 1.0)] == pytest.approx(
        [2 / 3, 2 / 3 + 0.1, 0.5 - 1 / 3, 2 / 3]
    )
    plain, rugged = (Student(Config(cells=8, rugged=n)) for n in (0, 4))
    middles = (np.arange(8) + 0.5) / 8
    tasks = [np.array([x, y]) for x in middles for y in middles]
    cells = [rugged.cell(task) for task in tasks]
    assert sorted(cells) == sorted(plain.cell(task) for task in tasks) and len(set(cells)) == 64
    along = np.diff([rugged.cell(np.array([x, 0.1]))[0] for x in middles])
    assert (along[::2] == 1).all() and (along[1::2] != 1).any()
    assert cells == [Student(Config(cells=8, rugged=4, seed=9)).cell(task) for task in tasks]


def test_progress_unlocks_more_than_chance(tmp_path: Path) -> None:
    """6 x 6 cells, 4,000 episodes, several in flight."""
    words = ("cells=6", "episodes=4000", "rows=4", "points=4")
    chance = final(tmp_path / "uniform", "teacher=uniform", *words)
    progress = final(tmp_path / "alpgmm", "teacher=alpgmm", "teacher.every=200", *words)
    assert chance <= 0.12 and progress >= 2 * chance and progress > 0.15
    assert np.load(tmp_path / "alpgmm" / "tasks.npz")["tasks"].shape == (4000, 3)


def test_words_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match='did you mean "alpgmm"'):
        main(["teacher=alpgm"])
    with pytest.raises(ConfigError, match='did you mean "cells"'):
        read(["cell=3"])
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        read(["quickly"])
    assert read(["teacher.random=0.5"]).settings["random"] == 0.5
