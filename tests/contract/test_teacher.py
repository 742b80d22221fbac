"""Teacher YAMLs keep the contract: the checks of `embodied check teacher`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from embodied.checks import teacher, teacher_games
from embodied.checks.check import Check
from embodied.checks.teacher import GAME, KINDS, TeacherSubject, need
from tests.tiers import once_per_class, usually

FILES = sorted(Path("configs/teacher").glob("*.yaml"))
NODES = {file.stem: yaml.safe_load(file.read_text()) for file in FILES}
GAMES = [name for name, node in NODES.items() if need(node["_target_"]) == GAME]
CHOOSERS = [name for name in NODES if name not in GAMES]
CASES = {case.id: case for case in once_per_class(FILES)}
# An exact resume needs the seed to decide.
USUAL = usually({*teacher.CHECKS} - {teacher.only_the_seed_decides}, teacher.CHECKS)
LEARNS_NOTHING = ("domain_randomization", "snapshot", "uniform")


def test_every_yaml_is_checked() -> None:
    """None is left out, and every kind of environment has a teacher."""
    assert sorted([*CHOOSERS, *GAMES]) == [file.stem for file in FILES] and GAMES
    assert {need(NODES[name]["_target_"]) for name in CHOOSERS} == set(KINDS)


@pytest.mark.parametrize("file", [CASES[name] for name in CHOOSERS])
@pytest.mark.parametrize("check", USUAL, ids=lambda check: check.__name__)
def test_the_contract(file: Path, check: Check) -> None:
    check(TeacherSubject(NODES[file.stem], learns=file.stem not in LEARNS_NOTHING))


@pytest.mark.parametrize("file", [CASES[name] for name in GAMES])
@pytest.mark.parametrize("check", teacher_games.CHECKS, ids=lambda check: check.__name__)
def test_the_contract_of_a_game(file: Path, check: Check) -> None:
    check(TeacherSubject(NODES[file.stem]))
