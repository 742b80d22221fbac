"""Two tiers: `pytest` runs the usual tests, `pytest --all` (`make test-all`) all of them: a check
of YAML files usually runs for one file of each class, and for each that alone takes a path of the
code; experiments so that each kind of options is in one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

CONFIGS = Path(__file__).parents[1] / "configs"
only_all = pytest.mark.only_all
"""The mark of a test that only `--all` runs: other tests run the same lines."""
NAMES = {"id", "text", "module", "apart"}
"""Settings whose words choose no path of this project's code: names of tasks of other packages."""


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="all tests, not one of each class only")


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `--all` runs, unless a test is asked for by its name."""
    if config.getoption("--all") or any("::" in word for word in config.args):
        return
    left = [item for item in items if item.get_closest_marker("only_all")]
    items[:] = [item for item in items if not item.get_closest_marker("only_all")]
    config.hook.pytest_deselected(items=left)


def usually(chosen: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`, one for each of `values` (tuples: for each of
    several names): those that are not `chosen` have the mark `only_all`."""
    return [
        pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=() if v in chosen else only_all)
        for v in values
    ]


def choices(node: Any) -> Iterator[tuple[Any, ...]]:
    """What a YAML node chooses in the code: classes, and switches, words and blocks of classes."""
    if isinstance(node, list):
        for each in node:
            yield from choices(each)
    if not isinstance(node, dict):
        return
    kind = node.get("_target_")
    if kind is not None:
        yield (kind,)
    for key, value in node.items():
        if kind is not None and key not in NAMES and isinstance(value, bool | str):
            yield kind, key, value
        elif kind is not None and isinstance(value, dict):
            yield kind, key
        yield from choices(value)


def examples(files: Sequence[Path], also: Collection[str] = ()) -> set[Path]:
    """A file for everything that `files` choose in the code, simple files first; and those whose
    names are in `also`."""
    nodes = {file: yaml.safe_load(file.read_text()) for file in files}
    chosen = {
        file: {("part", node.get("_target_")), *choices(node)} for file, node in nodes.items()
    }
    known: set[tuple[Any, ...]] = set()
    found = {file for file in files if file.stem in also}
    for file in sorted(files, key=lambda file: (len(chosen[file]), file.stem)):
        if chosen[file] - known:
            found.add(file)
        known |= chosen[file]
    return found


def once_per_class(
    files: Sequence[Path], also: Collection[str] = (), without: Collection[str] = ()
) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`, one for each file: those that are no `examples`,
    or are slow and `without` which their classes are checked too, have the mark `only_all`."""
    usual = {file for file in examples(files, also) if file.stem not in without}
    return [
        pytest.param(file, id=file.stem, marks=() if file in usual else only_all) for file in files
    ]


def cover(chosen: Mapping[str, set[Any]]) -> set[str]:
    """Few names that choose together all that any of them chooses: those with most first."""
    left = set[Any]().union(*chosen.values())
    found = set[str]()
    while left:
        best = max(sorted(chosen), key=lambda name: len(chosen[name] & left))
        found.add(best)
        left -= chosen[best]
    return found


def packages_of(group: str, option: str) -> set[tuple[str, str]]:
    """The packages of the classes that a YAML file of `group` names; the option where it names
    none. Of an environment nothing."""
    file = CONFIGS / group / f"{option}.yaml"
    node = yaml.safe_load(file.read_text()) if file.exists() else None
    kinds = [str(found[0]) for found in choices(node) if len(found) == 1]
    packages = {kind.rsplit(".", 2)[0] for kind in kinds} or {option}
    return {(group, package) for package in packages} if group != "env" else set()


def choices_of_experiment(file: Path) -> set[Any]:
    """The packages of an experiment's options, and what it sets of the data. Every class of them
    has checks of its own in tests/contract, with runs on the CPU or on a pretended device."""
    node = yaml.safe_load(file.read_text())
    found = set[Any]()
    for default in node.pop("defaults", []):
        for group, option in default.items() if isinstance(default, dict) else ():
            found |= packages_of(group.removeprefix("override ").strip("/"), str(option))
    return found | {("data", key) for key in node.get("data", {})}


def once_per_option(names: Sequence[str], without: Collection[str] = ()) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`, one for each experiment of `names`: `only_all` for
    those whose kinds of options other experiments have, and those `without`."""
    files = {n: CONFIGS / "experiment" / f"{n}.yaml" for n in names if n not in without}
    usual = cover({name: choices_of_experiment(file) for name, file in files.items()})
    return usually(usual, names)
