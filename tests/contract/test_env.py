"""Every environment YAML keeps the contract: the checks of `embodied check env`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from embodied.checks.check import Check
from embodied.checks.env import CHECKS, EnvSubject
from embodied.core.build import Node
from embodied.core.errors import NotApplicable
from tests.linear_system import roughly_fitted

# A robot is one row that no seed decides: tests/real_robot/test_env.py.
WIRED = {Path(f"configs/env/{name}.yaml") for name in ("robot", "robot_reach", "robot_shuttle")}
# They need packages of their own: tests/envs/test_process.py, test_ogbench.py, test_robosuite.py.
APART = {
    file
    for name in ("mjlab", "pusht", "ogbench_*", "robosuite_*")
    for file in Path("configs/env").glob(f"{name}.yaml")
}
FILES = sorted({*Path("configs/env").glob("*.yaml")} - WIRED - APART)


def settings_of(file: Path) -> Node:
    """The node of a file, with what the file leaves to the user."""
    given = {} if file.stem != "gym" else {"id": "MountainCarContinuous-v0"}
    if file.stem == "imagined":
        given = roughly_fitted()
    return yaml.safe_load(file.read_text()) | given


@pytest.fixture(params=FILES, ids=lambda file: file.stem, scope="module")
def subject(request: pytest.FixtureRequest) -> Iterator[EnvSubject]:
    made = EnvSubject(settings_of(request.param), most_steps=200, most_seconds=2.0)
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract(subject: EnvSubject, check: Check) -> None:
    try:
        check(subject)
    except NotApplicable as reason:
        pytest.skip(str(reason))
