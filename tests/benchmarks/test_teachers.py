"""The bench of teachers measures every one that chooses what is played, and writes it down."""

from __future__ import annotations

from pathlib import Path

import yaml

from benchmarks import teachers
from embodied.checks.teacher import ROWS, ready, teaching
from embodied.teachers.students.meta_acl import records
from tests.teachers.place import made


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
