"""Environments, policies, robots and teachers in configs/ keep the contract (`embodied check`)."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from embodied.checks import policy, robot, teacher, teacher_games
from embodied.checks.check import Check
from embodied.checks.env import CHECKS as ENV_CHECKS
from embodied.checks.env import EnvSubject
from embodied.checks.policy import SPECS, PolicySubject
from embodied.checks.robot import RobotSubject
from embodied.checks.teacher import GAME, KINDS, TeacherSubject, need
from embodied.compose import compose
from embodied.core.build import ConfigError
from embodied.core.errors import NotApplicable
from tests.tiers import once_per_class, usually

# It acts on symbols and uses nothing else that is observed: tests/learners/test_groove.py. The
# others need what lifetimes observe: tests/learners/test_meta_dt.py; or decide by a search, which
# hides a small influence: test_unizero.py; or need a point cloud and poses: test_m2t2.py.
APART = ("tabular", "m2t2", "meta_dt", "prompt_dt", "unizero", "scalezero")
POLICIES = sorted(
    file
    for file in (Path(__file__).parents[2] / "configs" / "policy").glob("*.yaml")
    if file.stem not in APART
)
# The rest of what cameras and symbols add is in tests/policies/test_encoders.py.
POLICY_CASES = [(spec, check) for spec in SPECS for check in policy.CHECKS]
SEEN = (
    *(policy.actions_have_shape_and_range, policy.observations_matter),
    policy.a_saved_policy_acts_bit_for_bit,
)
USUAL_CASES = [(spec, check) for spec, check in POLICY_CASES if spec == "state" or check in SEEN]


def name_of(value: str | Check) -> str:
    return value if isinstance(value, str) else value.__name__


def test_files_are_found() -> None:
    assert len(POLICIES) > 9 and len(ROBOTS) > 2 and len(TEACHERS) > 9


@pytest.mark.parametrize(("spec", "check"), usually(USUAL_CASES, POLICY_CASES), ids=name_of)
@pytest.mark.parametrize("file", once_per_class(POLICIES))
def test_the_contract_of_a_policy(file: Path, spec: str, check: Check) -> None:
    try:
        check(PolicySubject(yaml.safe_load(file.read_text()), SPECS[spec]))
    except NotApplicable as reason:
        pytest.skip(str(reason))


ROBOTS = sorted(Path(__file__).parents[2].glob("configs/robot/*.yaml"))
MISSING = "???"
COMPLETE = [file for file in ROBOTS if MISSING not in file.read_text()]


def composed(file: Path) -> dict[str, Any]:
    """As `embodied deploy` composes it, with a task in front of it where it has an environment."""
    text = yaml.safe_load(file.read_text())
    words = [
        f"robot.{part}.world.task=reach"
        for part in ("driver", "emulator")
        if (text.get(part) or {}).get("world")
    ]
    return compose("deploy", [f"robot={file.stem}", *words]).node["robot"]


@pytest.mark.parametrize("file", once_per_class(COMPLETE))
@pytest.mark.parametrize("check", robot.CHECKS, ids=lambda check: check.__name__)
def test_it_fits_together(file: Path, check: Check) -> None:
    check(RobotSubject(composed(file)))


@pytest.mark.parametrize("file", sorted({*ROBOTS} - {*COMPLETE}), ids=lambda f: f.stem)
def test_what_is_not_given_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"robot\.\S+ is not given"):
        composed(file)


TEACHERS = sorted(Path("configs/teacher").glob("*.yaml"))
NODES = {file.stem: yaml.safe_load(file.read_text()) for file in TEACHERS}
GAMES = [name for name, node in NODES.items() if need(node["_target_"]) == GAME]
CHOOSERS = [name for name in NODES if name not in GAMES]
TEACHER_CASES = {case.id: case for case in once_per_class(TEACHERS)}
# An exact resume needs the seed to decide.
USUAL_CHECKS = usually({*teacher.CHECKS} - {teacher.only_the_seed_decides}, teacher.CHECKS)
LEARNS_NOTHING = ("domain_randomization", "snapshot", "uniform")


def test_every_yaml_is_checked() -> None:
    """None is left out, and every kind of environment has a teacher."""
    assert sorted([*CHOOSERS, *GAMES]) == [file.stem for file in TEACHERS] and GAMES
    assert {need(NODES[name]["_target_"]) for name in CHOOSERS} == set(KINDS)


@pytest.mark.parametrize("file", [TEACHER_CASES[name] for name in CHOOSERS])
@pytest.mark.parametrize("check", USUAL_CHECKS, ids=lambda check: check.__name__)
def test_the_contract_of_a_teacher(file: Path, check: Check) -> None:
    check(TeacherSubject(NODES[file.stem], learns=file.stem not in LEARNS_NOTHING))


@pytest.mark.parametrize("file", [TEACHER_CASES[name] for name in GAMES])
@pytest.mark.parametrize("check", teacher_games.CHECKS, ids=lambda check: check.__name__)
def test_the_contract_of_a_game(file: Path, check: Check) -> None:
    check(TeacherSubject(NODES[file.stem]))


@pytest.mark.parametrize("check", ENV_CHECKS, ids=lambda check: check.__name__)
def test_the_contract_of_an_environment(
    env_subject: EnvSubject, check: Check, request: pytest.FixtureRequest
) -> None:
    many = request.config.getoption("--all") and "envpool" in str(env_subject.node["_target_"])
    try:
        if many:  # EnvPool keeps what it loads for each family
            number = ENV_CHECKS.index(check)
            sizes = env_subject.most_steps, env_subject.most_seconds
            apart = request.getfixturevalue("apart")
            apart.submit(checked, json.dumps(env_subject.node), number, *sizes).result()
        else:
            check(env_subject)
    except NotApplicable as reason:
        pytest.skip(str(reason))


def checked(node: str, number: int, most_steps: int, most_seconds: float) -> None:
    """Make a check in this process; its environment stays until another one is asked for."""
    ENV_CHECKS[number](subject_of(node, most_steps, most_seconds))


@lru_cache(1)
def subject_of(node: str, most_steps: int, most_seconds: float) -> EnvSubject:
    return EnvSubject(json.loads(node), most_steps, most_seconds)
