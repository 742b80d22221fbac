"""Old names of modules, classes, options and settings are answered, each with one warning."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from embodied import moved
from embodied.core.build import resolve
from embodied.core.env import VecEnv

MODULES = sorted(moved.table()["modules"].items())


@pytest.fixture(autouse=True)
def warned_anew() -> None:
    moved.warn.cache_clear()


def test_every_module_that_moved_is_there() -> None:
    for new in moved.table()["modules"].values():
        importlib.import_module(new)


def test_every_renamed_name_is_there() -> None:
    for module, names in moved.table()["names"].items():
        for new in names.values():
            home, _, name = (new if "." in new else f"{module}.{new}").rpartition(".")
            assert hasattr(importlib.import_module(home), name), f"{home}.{name}"


def test_every_renamed_option_is_there() -> None:
    configs = Path(__file__).parents[1] / "configs"
    for group, names in moved.table()["options"].items():
        for new in names.values():
            assert (configs / group / f"{new}.yaml").exists(), f"{group}/{new}"


def test_no_old_name_is_a_name_of_today() -> None:
    """Else the old name would be found, and be something else."""
    for module, names in moved.table()["names"].items():
        for old in names:
            assert old not in vars(importlib.import_module(module)), f"{module}.{old}"


def test_an_old_target_resolves_with_one_warning() -> None:
    with pytest.warns(moved.MovedWarning, match="is now envs") as caught:
        first = resolve("embodied.envs.crafter.Crafter", VecEnv)
        assert resolve("embodied.envs.crafter.Crafter", VecEnv) is first
    assert len(caught) == 1


def test_an_old_module_is_imported_by_its_old_name() -> None:
    with pytest.warns(moved.MovedWarning, match=r"embodied\.core\.nets\.mlp is now"):
        from embodied.core.nets import mlp  # pyright: ignore
    from embodied.nn.networks import mlp as today

    assert mlp is today


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("embodied.core.never")
    with pytest.raises(ImportError):
        from embodied.envs.crafter import Never  # noqa: F401  # pyright: ignore


def test_the_command_line_says_it_in_one_line() -> None:
    hook = "import warnings, embodied.cli as c, embodied.moved as m\n"
    hook += "warnings.showwarning = c._shown_in_one_line(warnings.showwarning)\nm.warn('a', 'b')"
    done = subprocess.run([sys.executable, "-c", hook], capture_output=True, text=True, check=True)
    assert done.stderr == "embodied: a is now b\n"
