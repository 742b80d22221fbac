"""The bench of teachers measures every one that chooses what is played, and writes it down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import teachers
from embodied.checks.teacher import ROWS, ready, teaching
from embodied.core.spec import Spec
from embodied.teachers.students.meta_acl import records
from tests.teachers.place import made
from tests.teachers.test_regret import SMALL
from tests.tiers import only_all


def small(node: Mapping[str, Any], spec: Spec, folder: Path) -> dict[str, Any]:
    """`node` as the bench builds it; an autoencoder of levels is fitted in seconds."""
    made = ready(node, spec, folder)
    return {**made, "autoencoder": SMALL} if "autoencoder" in made else made


@only_all
def test_a_row_for_every_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers, "episode", lambda repeats: 0.5)
    monkeypatch.setattr(teachers, "ready", small)
    rows = teachers.run(tmp_path, repeats=1, episodes=20)
    written = json.loads((tmp_path / "teachers.json").read_text())["rows"]
    names = {row["name"] for row in written}
    assert names == {path.stem for path in teachers.files()} - {"adversarial_surprise"}  # a game
    assert len(rows) == len(written)
    for row in written:
        notes, seconds = row["notes"], 1 / row["ours_rate"]
        assert notes["microseconds"] == pytest.approx(1e6 * seconds)
        assert notes["share"] == pytest.approx(seconds / (seconds + 0.5))


def test_an_episode_of_a_run_costs_something() -> None:
    assert teachers.episode(1) > 0.001


def test_a_block_is_as_many_episodes_as_it_says() -> None:
    teacher = made("tasks.uniform.Uniform")
    block = teaching(teacher, 30)
    assert [block(), block()] == [30, 30]
    assert teacher.issued == ROWS + 60 and len(teacher.pending) == ROWS


def test_a_classroom_is_made_where_one_is_read(tmp_path: Path) -> None:
    node = yaml.safe_load(Path("configs/teacher/meta_acl.yaml").read_text())
    room = ready(node, teachers.SPEC, tmp_path)
    assert sorted(records(Path(room["archive"]))) == ["seed-1", "seed-2"]
    assert ready({"_target_": "x"}, teachers.SPEC, tmp_path) == {"_target_": "x"}
