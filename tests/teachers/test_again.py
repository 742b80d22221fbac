"""AGAIN, the toy student, and the picture of where a teacher sampled, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.toy_student import Config, Student, main, turned
from embodied.core.build import ConfigError
from embodied.teachers.plots import CELLS, density, draw, quarters, success
from embodied.teachers.students.meta_acl import Record, choose_expert, curriculum, probes, records
from tests.teachers.place import ended, made, point, rng

TARGET = "students.meta_acl.MetaAcl"


def past(tests: list[list[float]], final: float = 0.5, d: int = 2) -> Record:
    """A student with three fits of 2, 1 and 1 components; alp 0.1, 0.5 | 0.1 | 0.4."""
    return Record(
        tests=np.array(tests),
        final=np.full(4, final),
        at=np.array([250.0, 500, 750]),
        sizes=np.array([2.0, 1, 1]),
        means=np.array([[0.1 * i] * d + [alp] for i, alp in enumerate([0.1, 0.5, 0.1, 0.4])]),
        covs=np.repeat(1e-6 * np.eye(d + 1)[None], 4, 0),
        points=np.zeros((8, d)),
        scores=np.array([0.9, 0.9, 0.0, 0.2, 0.4, 0.9, 0.5, 0.7]),
        fit=np.array([-1.0, 0, 0, 0, 0, 1, 2, 2]),
        component=np.array([-1.0, 0, 1, 1, 1, 0, 0, 0]),
    )


NOVICE = past([[0.0] * 4])


def again(folder: Path, **settings: Any) -> Any:
    NOVICE.write(folder / "one.npz")
    teacher = made(TARGET, archive=str(folder), random=0.0, random_taught=0.0, **settings)
    teacher.expert = curriculum(NOVICE, 0.2, 2)
    return teacher


def take(teacher: Any, score: float, *memo: Any) -> None:
    teacher.take(point(0.5, 0.5), score, [*memo])


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record = past([[0.0, 0.5, 1.0, 0.25]])
    record.write(tmp_path / "one.npz")
    for name, value in vars(records(tmp_path)["one"]).items():
        assert getattr(record, name) == pytest.approx(value)
    assert (tmp_path / "one.npz").stat().st_size < 4000


def test_probes_fill_the_cube() -> None:
    """Halton: 1/2, 1/4, 3/4, ... and 1/3, 2/3, 1/9, ...; a student is asked within the box."""
    halton = np.array([[1 / 2, 1 / 3], [1 / 4, 2 / 3], [3 / 4, 1 / 9], [1 / 8, 4 / 9]])
    assert probes(4, 2) == pytest.approx(halton)
    assert probes(256, 3).mean(0) == pytest.approx([0.5] * 3, abs=0.02)


def test_students_can_be_asked(tmp_path: Path) -> None:
    teacher = made(TARGET, archive=str(tmp_path), stepping="none", box={"x": [0.0, 0.5]})
    teacher.student = SimpleNamespace(tests=lambda tasks: tasks[:, 0])
    assert teacher.test() == pytest.approx(probes(64, 2)[:, 0] / 2)


def test_the_best_of_those_who_were_like_it_is_followed() -> None:
    """Of the two nearest after two epochs the one with the greater final sum, not the best of all.
    A student with one epoch only cannot be compared."""
    known = {
        "far": past([[9.0] * 4, [1.0] * 4], final=1.0),
        "near": past([[0.0] * 4, [0.1] * 4], final=0.3),
        "nearer": past([[9.0] * 4, [0.2] * 4], final=0.6),
        "short": past([[0.2] * 4], final=2.0),
    }

    def chosen(test: float, epoch: int, neighbours: int, how: str = "knowledge") -> str | None:
        return choose_expert(known, np.full(4, test), epoch, neighbours, how, random)

    random = rng(0)
    found = [chosen(0.16, 2, 2), chosen(0.16, 2, 1), chosen(0.11, 2, 1), chosen(0.16, 2, 3)]
    assert found == ["nearer", "nearer", "near", "far"]
    assert chosen(0.16, 3, 3) is None
    assert {chosen(0.16, 2, 1, "random") for _ in range(40)} == known.keys() - {"short"}


def test_lively_components_and_what_was_reached_in_them() -> None:
    """alp > 0.2: the second component of the first fit (last two scores 0.2, 0.4) and the third
    fit (0.5, 0.7); the second fit is empty."""
    stages = [(stage["alp"].tolist(), stage["score"]) for stage in curriculum(NOVICE, 0.2, 2)]
    assert stages == [([0.5], pytest.approx(0.3)), ([0.4], pytest.approx(0.6))]
    assert curriculum(NOVICE, 0.2, 50)[0]["score"] == pytest.approx(0.2)
    assert curriculum(NOVICE, 0.9, 50) == []


def test_stepping_by_return(tmp_path: Path) -> None:
    """The first stage is left when the last two scores reach 0.3 in the mean. Tasks are of one
    stage at a time."""
    teacher = again(tmp_path, recent=2, refresh=3)
    for score, stage in ((0.5, 0), (0.0, 0), (0.5, 0), (0.2, 1)):
        assert [(kind, number) for kind, number, _ in teacher.pools()] == [("expert", 0)]
        take(teacher, 1.0, "own", 0, 0)  # not of the expert's components
        take(teacher, score, "expert", 0, 0)
        assert teacher.stage == stage
    assert [(kind, number) for kind, number, _ in teacher.pools()] == [("expert", 1)]
    assert {memo[1] for _, memo in teacher.propose(20)} == {1}
    take(teacher, 1.0, "expert", 0, 0)  # late, of the stage before
    assert teacher.scored == [] and not teacher.finished
    for _ in range(2):
        take(teacher, 0.6, "expert", 1, 0)
    assert teacher.finished and teacher.stage == 1


def test_after_the_last_stage_its_components_live_by_their_progress(tmp_path: Path) -> None:
    teacher = again(tmp_path, refresh=3)
    teacher.stage, teacher.finished = 1, True
    teacher.expert[1]["alp"] = np.array([0.4, 0.8])
    for i in range(6):
        teacher.keep(point(0.5, 0.5), 0.1 * (i == 5))
    assert teacher.ratio() == teacher.config.random
    for score in (0.1, 0.4, 0.4):  # progress 0, 0.3, 0
        take(teacher, score, "expert", 1, 0)
    assert teacher.expert[1]["alp"] == pytest.approx([0.1, 0.8])


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


def test_nobody_to_follow(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stepping=none"):
        made(TARGET, archive=str(tmp_path / "empty"))
    past([[0.0] * 64], d=3).write(tmp_path / "other.npz")
    teacher = made(TARGET, archive=str(tmp_path), epoch=10)
    with pytest.warns(UserWarning, match="no past student"):
        for _ in range(10):
            teacher.update(teacher.sample(1)[1], ended(0.5))
    assert teacher.chosen == "" and not teacher.expert


def student(**settings: Any) -> Student:
    return Student(Config(**settings))


def play(one: Student, x: float, y: float, times: int = 1) -> float:
    return float(one.play(torch.tensor([[x, y]]).repeat(times, 1)).ret[-1])


def test_cells_open_from_the_corner_one_after_the_other() -> None:
    """The corner always teaches; its neighbours from 75 on, the diagonal one too."""
    one = student(cells=10)
    for x, y, times, competence in (
        (0.15, 0.05, 1, 0),
        (0.05, 0.05, 74, 0.74),
        (0.15, 0.05, 1, 0),
        (0.05, 0.05, 1, 0.75),
        (0.15, 0.05, 1, 0.01),
        (0.15, 0.15, 1, 0.01),
        (0.25, 0.05, 1, 0),
    ):
        assert play(one, x, y, times) == pytest.approx(competence)
    assert one.unlocked() == 0
    assert play(one, 0.05, 0.05) == pytest.approx(0.76) and one.unlocked() == 0.01
    assert play(one, 0.05, 0.05, 40) == 1.0  # and not more


def test_variants() -> None:
    """Success from 0.5 on; a quarter turn (x, y) -> (y, 1 - x) moves the easy corner to (1, 0)."""
    plain = student()
    assert plain.play(torch.zeros(60, 2)).success.tolist() == [0] * 49 + [1] * 11
    assert plain.tests(np.array([[0.0, 0.0], [0.9, 0.9]])).tolist() == [0.6, 0.0]
    assert turned(np.array([0.2, 0.7]), 4) == pytest.approx([0.2, 0.7])
    assert play(student(turn=1), 0.95, 0.05) == pytest.approx(0.01)


def test_progress_unlocks_more_than_chance(tmp_path: Path) -> None:
    """6 x 6 cells, 4,000 episodes, several in flight."""

    def final(teacher: str, *more: str) -> float:
        words = ("cells=6", "episodes=4000", "rows=4", "points=4", f"out={tmp_path / teacher}")
        rows = (main([f"teacher={teacher}", *more, *words]) / "metrics.jsonl").read_text()
        return json.loads(rows.splitlines()[-1])["eval/unlocked"]

    chance, progress = final("uniform"), final("alpgmm", "teacher.every=200")
    assert chance <= 0.12 and progress >= 2 * chance and progress > 0.15
    assert np.load(tmp_path / "alpgmm" / "tasks.npz")["tasks"].shape == (4000, 3)


def test_quarters_are_of_the_time_not_of_the_episodes() -> None:
    parts = quarters(np.array([0.0, 1.0, 2.0, 30.0, 55.0, 100.0]))
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3], [4], [5]]
    assert [len(part) for part in quarters(np.array([7.0]))] == [1, 0, 0, 0]


def test_density_is_against_uniform() -> None:
    """All in the lower left quarter: four times uniform there, none at the other end."""
    x, y = np.random.default_rng(0).random((2, 40_000)) / 2
    dense = density(x, y)
    assert dense.shape == (CELLS, CELLS) and dense.mean() == pytest.approx(1)
    assert dense[:15, :15].mean() == pytest.approx(4, rel=0.1) and dense[30:, 30:].max() < 1e-9
    assert density(x + 0.5, y)[5, 30] > 1 > density(x + 0.5, y)[30, 5]  # rows are y
    assert density(np.array([]), np.array([])).sum() == 0


def test_success_is_the_mean_around() -> None:
    x, y = np.random.default_rng(0).random((2, 20_000))
    won = success(x, y, (x < 0.5).astype(float))
    assert won[20, [5, 35]] == pytest.approx([1, 0], abs=1e-6)
    assert won[20, 19] > 0.5 > won[20, 20]
    assert np.isnan(success(x / 4, y / 4, x)[35, 35])
    assert np.isfinite(success(x, y, np.where(x < 0.5, np.nan, 1.0))).any()


@pytest.mark.parametrize("d", [1, 3])
def test_a_png_for_people(d: int, tmp_path: Path) -> None:
    points, scores = np.random.default_rng(0).random((300, d)), np.arange(300) / 300
    scores[:10] = np.nan
    names, file = ("goal_x", "goal_y", "goal_z")[:d], tmp_path / "a" / "tasks.png"
    assert draw(file, np.arange(300.0), points, scores, names, (0, d - 1)) == file
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and file.stat().st_size > 5000
    with pytest.raises(ConfigError, match="no episode has finished"):
        draw(file, np.zeros(0), points[:0], scores[:0], names, (0, d - 1))
