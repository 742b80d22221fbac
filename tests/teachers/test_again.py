"""AGAIN, the toy student, and the picture of where a teacher sampled, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.toy_student import Config, Student, main, read, shuffled, turned
from embodied.core.build import ConfigError
from embodied.teachers.plots import CELLS, density, draw, quarters, success
from embodied.teachers.students.meta_acl import Record, choose_expert, curriculum, probes, records
from tests.teachers.place import ended, made, point, rng

TARGET = "students.meta_acl.MetaAcl"


def past(tests: list[list[float]], final: float = 0.5, d: int = 2) -> Record:
    """A student with three fits of 2, 1 and 1 components; alp 0.1, 0.5 | 0.1 | 0.4."""
    alp = [0.1, 0.5, 0.1, 0.4]
    means = np.array([[0.1 * i] * d + [a] for i, a in enumerate(alp)])
    fit = [-1, 0, 0, 0, 0, 1, 2, 2]
    component = [-1, 0, 1, 1, 1, 0, 0, 0]
    scores = [0.9, 0.9, 0.0, 0.2, 0.4, 0.9, 0.5, 0.7]
    return Record(
        tests=np.array(tests),
        final=np.full(4, final),
        at=np.array([250.0, 500, 750]),
        sizes=np.array([2.0, 1, 1]),
        means=means,
        covs=np.repeat(1e-6 * np.eye(d + 1)[None], 4, 0),
        points=np.zeros((8, d)),
        scores=np.array(scores),
        fit=np.array(fit, float),
        component=np.array(component, float),
    )


def room(folder: Path, **students: Record) -> Path:
    for name, record in students.items():
        record.write(folder / f"{name}.npz")
    return folder


def again(folder: Path, **settings: Any) -> Any:
    room(folder, one=past([[0.0] * 4]))
    teacher = made(TARGET, archive=str(folder), random=0.0, random_taught=0.0, **settings)
    teacher.expert = curriculum(past([[0.0] * 4]), 0.2, 2)
    return teacher


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    found = records(room(tmp_path, one=past([[0.0, 0.5, 1.0, 0.25]])))["one"]
    for name, value in vars(past([[0.0, 0.5, 1.0, 0.25]])).items():
        assert getattr(found, name) == pytest.approx(value)
    assert (tmp_path / "one.npz").stat().st_size < 4000


def test_probes_fill_the_cube() -> None:
    """Halton: 1/2, 1/4, 3/4, ... and 1/3, 2/3, 1/9, ..."""
    assert probes(4, 2) == pytest.approx(
        np.array([[1 / 2, 1 / 3], [1 / 4, 2 / 3], [3 / 4, 1 / 9], [1 / 8, 4 / 9]])
    )
    assert probes(256, 3).mean(0) == pytest.approx([0.5] * 3, abs=0.02)


def test_the_best_of_those_who_were_like_it_is_followed() -> None:
    """Of the two nearest after two epochs the one with the greater final sum, not the best of all.
    A student with one epoch only cannot be compared."""
    known = {
        "far": past([[9.0] * 4, [1.0] * 4], final=1.0),
        "near": past([[0.0] * 4, [0.1] * 4], final=0.3),
        "nearer": past([[9.0] * 4, [0.2] * 4], final=0.6),
        "short": past([[0.2] * 4], final=2.0),
    }
    random = rng(0)
    test = np.full(4, 0.16)
    assert choose_expert(known, test, 2, 2, "knowledge", random) == "nearer"
    assert choose_expert(known, test, 2, 1, "knowledge", random) == "nearer"
    assert choose_expert(known, np.full(4, 0.11), 2, 1, "knowledge", random) == "near"
    assert choose_expert(known, test, 2, 3, "knowledge", random) == "far"
    assert choose_expert(known, test, 3, 3, "knowledge", random) is None
    assert {
        choose_expert(known, test, 2, 1, "random", random) for _ in range(40)
    } == known.keys() - {"short"}


def test_lively_components_and_what_was_reached_in_them() -> None:
    """alp > 0.2: the second component of the first fit (last two scores 0.2, 0.4) and the third
    fit (0.5, 0.7); the second fit is empty."""
    first, second = curriculum(past([[0.0] * 4]), 0.2, 2)
    assert first["alp"].tolist() == [0.5] and first["score"] == pytest.approx(0.3)
    assert second["alp"].tolist() == [0.4] and second["score"] == pytest.approx(0.6)
    assert curriculum(past([[0.0] * 4]), 0.2, 50)[0]["score"] == pytest.approx(0.2)
    assert curriculum(past([[0.0] * 4]), 0.9, 50) == []


def test_stepping_by_return(tmp_path: Path) -> None:
    """The first stage is left when the last two scores reach 0.3 in the mean."""
    teacher = again(tmp_path, recent=2, refresh=3)
    for score, stage in ((0.5, 0), (0.0, 0), (0.5, 0), (0.2, 1)):
        teacher.take(point(0.5, 0.5), 1.0, ["own", 0, 0])  # not of the expert's components
        teacher.take(point(0.5, 0.5), score, ["expert", 0, 0])
        assert teacher.stage == stage
    assert teacher.stage == 1 and teacher.scored == []
    teacher.take(point(0.5, 0.5), 1.0, ["expert", 0, 0])  # late, of the stage before
    assert teacher.scored == [] and not teacher.finished
    for _ in range(2):
        teacher.take(point(0.5, 0.5), 0.6, ["expert", 1, 0])
    assert teacher.finished and teacher.stage == 1


def test_after_the_last_stage_its_components_live_by_their_progress(tmp_path: Path) -> None:
    teacher = again(tmp_path, refresh=3)
    teacher.stage, teacher.finished = 1, True
    teacher.expert[1]["alp"] = np.array([0.4, 0.8])
    for i in range(6):
        teacher.keep(point(0.5, 0.5), 0.1 * (i == 5))
    assert teacher.ratio() == teacher.config.random
    for component, score in ((0, 0.1), (0, 0.4), (0, 0.4)):  # progress 0, 0.3, 0
        teacher.take(point(0.5, 0.5), score, ["expert", 1, component])
    assert teacher.expert[1]["alp"] == pytest.approx([0.1, 0.8])


def test_one_stage_at_a_time_beside_ones_own(tmp_path: Path) -> None:
    teacher = again(tmp_path)
    assert [(kind, number) for kind, number, _ in teacher.pools()] == [("expert", 0)]
    teacher.stage = 1
    assert [(kind, number) for kind, number, _ in teacher.pools()] == [("expert", 1)]
    assert {memo[1] for _, memo in teacher.propose(20)} == {1}


def test_from_filling_a_classroom_to_following_somebody(tmp_path: Path) -> None:
    """Two past students: one learned on the left, one on the right; a new one that is like the
    first follows that one."""
    sizes = {"epoch": 120, "every": 40, "most": 3, "probes": 16, "memory": 50}

    def play(teacher: Any, episodes: int, left: bool) -> None:
        for played in range(episodes):
            tasks, tickets = teacher.sample(1)
            good = (float(tasks[0, 0]) < 0.5) == left
            teacher.update(tickets, ended(float(good and (played // 7) % 2)))

    for seed, left in ((1, True), (2, False)):
        own = made(TARGET, seed, archive=str(tmp_path), stepping="none", **sizes)
        play(own, 240, left)
    assert sorted(records(tmp_path)) == ["seed-1", "seed-2"]
    for seed, left in ((3, True), (4, False)):
        new = made(TARGET, seed, archive=str(tmp_path), lively=0.05, neighbours=1, **sizes)
        play(new, 130, left)
        assert new.chosen == ("seed-1" if left else "seed-2")
        means = np.concatenate([stage["mean"][:, 0] for stage in new.expert])
        assert (np.median(means) < 0.5) == left
    assert len(records(tmp_path)) == 2  # who follows does not join unless asked to


def test_students_can_be_asked(tmp_path: Path) -> None:
    class Student:
        def tests(self, tasks: np.ndarray) -> np.ndarray:
            return tasks[:, 0]

    teacher = made(TARGET, archive=str(tmp_path), stepping="none", box={"x": [0.0, 0.5]})
    teacher.student = Student()
    assert teacher.test() == pytest.approx(probes(64, 2)[:, 0] / 2)


def test_nobody_to_follow(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stepping=none"):
        made(TARGET, archive=str(tmp_path / "empty"))
    room(tmp_path, other=past([[0.0] * 64], d=3))
    teacher = made(TARGET, archive=str(tmp_path), epoch=10)
    with pytest.warns(UserWarning, match="no past student"):
        for _ in range(10):
            teacher.update(teacher.sample(1)[1], ended(0.5))
    assert teacher.chosen == "" and not teacher.expert


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
