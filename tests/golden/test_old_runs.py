"""Runs, demonstrations, packages and names of commit 8490570 go on working.

What is below `data/` was made by the code of then (`make_old_runs.py`) and is never edited: run
folders, a dataset, a user's package with YAML files. Every case of `runs.py` is played on copies.
"""

from __future__ import annotations

import importlib
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from embodied import moved
from embodied.compose import PACKAGED, compose, options
from embodied.core.build import ConfigError, named_function, resolve
from tests.golden import fingerprint, runs

EXPECTED = fingerprint.read(runs.FILE)
NAMES = (runs.DATA / "names.txt").read_text().split()
SETTINGS = (runs.DATA / "settings.txt").read_text().split()
ELSEWHERE = 0.05  # how far a return may be off on another platform
OF_TRAINING = ("env", "policy", "learner", "finetune", "reward", "teacher", "replay", "weighting")


def same(case: str, now: runs.Figures, then: runs.Figures) -> None:
    """Exactly where it was recorded; elsewhere as far as training and chance allow."""
    if fingerprint.platform() == EXPECTED["platform"]:
        assert now == then
        return
    assert now.keys() == then.keys()
    assert all(math.isfinite(value) for value in now.values() if isinstance(value, float))
    if case in runs.DECIDED:
        assert fingerprint.agree(now["summary"], then["summary"])
    if case in runs.TRAINED:
        assert now["step"] == then["step"]
        assert now["summary"][:2] == then["summary"][:2]
    if case in runs.EVALUATED and "successes" not in then:
        assert now["return"] == pytest.approx(then["return"], rel=ELSEWHERE)


@pytest.mark.parametrize("case", sorted(EXPECTED["records"]))
def test_what_was_made_then_still_works(case: str, tmp_path: Path) -> None:
    with runs.inside(tmp_path):
        now = runs.CASES[case]()
    same(case, now, EXPECTED["records"][case])


def test_every_case_is_recorded() -> None:
    assert EXPECTED["records"].keys() == runs.CASES.keys()


def found(name: str) -> Any:
    """The class, the function or the module of a dotted name."""
    for role in ("kinematics", "scheduled reward", "onboard export"):
        with suppress(ConfigError):
            return named_function(name, role)
    try:
        return resolve(name, object)
    except ConfigError:
        return importlib.import_module(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_that_ever_stood_in_yaml_resolves(name: str) -> None:
    made = found(name)
    if name.rpartition(".")[2][0].isupper():
        assert isinstance(made, type)


def composed(group: str, option: str) -> dict[str, Any]:
    """A run's configuration with this option in it."""
    if group == "experiment":
        return compose("train", [f"experiment={option}"]).node
    base = {"env": "pendulum", "policy": "gaussian", "learner": "sac", group: option}
    return compose("train", [f"{key}={value}" for key, value in base.items()]).node


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_option_of_then_can_be_chosen(setting: str) -> None:
    group, option = setting.split("/")
    if group in (*OF_TRAINING, "experiment"):
        assert composed(group, option)
    elif group == "demonstrator":
        words = ["env=pendulum", f"demonstrator={option}", "out=demos"]
        words += ["demonstrator.run=old_run_sac"] if option == "trained" else []
        assert compose("collect", words).node["demonstrator"]
    else:
        assert moved.option(group, option) in options(group, [PACKAGED])
