"""Every robot's YAML: it is one, what it is made of fits together, and nothing that is somebody's
own has a default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from embodied.checks.check import Check
from embodied.checks.robot import CHECKS, RobotSubject
from embodied.compose import compose
from embodied.core.build import ConfigError
from tests.tiers import once_per_class

FILES = sorted(Path(__file__).parents[2].glob("configs/robot/*.yaml"))
MISSING = "???"
COMPLETE = [file for file in FILES if MISSING not in file.read_text()]


def robot(file: Path) -> dict[str, Any]:
    """As `embodied deploy` composes it, with a task in front of it where it has an environment."""
    text = yaml.safe_load(file.read_text())
    words = [
        f"robot.{part}.world.task=reach"
        for part in ("driver", "emulator")
        if (text.get(part) or {}).get("world")
    ]
    return compose("deploy", [f"robot={file.stem}", *words]).node["robot"]


@pytest.mark.parametrize("file", once_per_class(COMPLETE))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_fits_together(file: Path, check: Check) -> None:
    check(RobotSubject(robot(file)))


@pytest.mark.parametrize("file", sorted({*FILES} - {*COMPLETE}), ids=lambda f: f.stem)
def test_what_is_not_given_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"robot\.\S+ is not given"):
        robot(file)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_it_has_a_sentence(file: Path) -> None:
    assert file.read_text().startswith("# "), "a sentence for `embodied list robots`"


def test_there_are_some() -> None:
    assert {"sim", "so101_sim", "so101"} <= {file.stem for file in FILES}
