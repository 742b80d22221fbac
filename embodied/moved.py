"""Old names of modules, classes and options: what was written with them goes on working.

`moved.yaml` lists them. Three places ask here: `core.build` (the `_target_` and settings of a node
in a checkpoint or a YAML file), Python's import system (`import embodied.core.nets` in a user's
package, by the finder that `install` adds behind Python's own), and `compose` (`learner=dsact`).
Each old name is answered with one warning line that says the new one.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any


class MovedWarning(UserWarning):
    """A name is an old one; the message says what to write instead."""


@cache
def table() -> dict[str, dict[str, Any]]:
    """`moved.yaml`: modules, names, options and settings, each from old to new; settings that are
    gone."""
    import yaml

    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


@cache
def warn(old: str, new: str) -> None:
    """One line, once in a process for each old name."""
    warnings.warn(f"{old} is now {new}", MovedWarning, stacklevel=3)


def target(dotted: str) -> str:
    """Today's dotted name of the class or function `dotted`; itself where it has not moved."""
    module, _, name = dotted.rpartition(".")
    module = table()["modules"].get(module, module)
    new = _full(module, table()["names"].get(module, {}).get(name, name))
    if new != dotted:
        warn(dotted, new)
    return new


def _full(module: str, name: str) -> str:
    """`name` is one of `module`, or dotted where it has moved to another one."""
    return name if "." in name or not module else f"{module}.{name}"


def option(group: str, name: str) -> str:
    """Today's name of option `name` of the configuration group `group`."""
    new = table()["options"].get(group, {}).get(name, name)
    if new != name:
        warn(f"{group}={name}", f"{group}={new}")
    return new


def settings(dotted: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` settings of the class with today's name `dotted`, by their names of today; those
    that are gone are left out."""
    new, gone = table()["settings"].get(dotted, {}), table()["gone"].get(dotted, [])
    for old in given.keys() & set(gone):
        warn(f"the setting {old} of {dotted}", "without effect")
    given = {key: value for key, value in given.items() if key not in gone}
    for old in given.keys() & new.keys():
        warn(f"the setting {old} of {dotted}", new[old])
    named = dict[str, Any]()
    for key, value in given.items():
        there = named.get(new.get(key, key))
        if isinstance(value, Mapping) and isinstance(there, Mapping):  # one half by the old name
            value = {**there, **value}
        named[new.get(key, key)] = value
    return named


def run_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run by their names of today: flat ones of before are put under `data`."""
    new, made = table()["run"], dict(given)
    if isinstance(made.get("data"), str):
        made["data"] = {"regime": option("data", made["data"])}
    old = [key for key in given if key in new]
    if not old:
        return made
    warn(f"the run's {', '.join(old)}", ", ".join(new[key] for key in old))
    found = {new[key].removeprefix("data."): made.pop(key) for key in old}
    made["data"] = {**found, **(made.get("data") or {})}
    return made


def folder_key(key: str, known: Mapping[str, Any]) -> str:
    """The output folder is `out` on every command line and was `output` on some: whichever of the
    two `known` settings have, where `key` is the other one."""
    other = str(table()["folder"].get(key, key))
    return other if other in known and key not in known else key


def attributes(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__` (PEP 562) that knows its names of before.

    For a package that bears the name of an old module (`embodied.envs.crafter`, now
    `embodied.envs.crafter.env`), and for a module whose public classes were renamed.
    """

    def lookup(name: str) -> Any:
        home = table()["modules"].get(module, module)
        new = table()["names"].get(home, {}).get(name, name)
        if name.startswith("__") or (home, new) == (module, name) or _submodule(module, name):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = _full(home, new).rpartition(".")
        value = getattr(importlib.import_module(home), new)
        warn(f"{module}.{name}", f"{home}.{new}")
        return value

    return lookup


def _submodule(module: str, name: str) -> bool:
    """Whether `name` is a module of the package `module`, which Python imports by itself."""
    path = getattr(sys.modules.get(module), "__path__", None)
    return path is not None and any((Path(f) / f"{name}.py").exists() for f in path)


class _Moved(types.ModuleType):
    """Stands where a module was: its names are those of the module that it became."""

    def __getattr__(self, name: str) -> Any:
        return attributes(self.__name__)(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules by their old names, where nothing else found them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root = name.partition(".")[0]
        if root not in ("embodied", "envs", "policies", "real_robot"):
            return None
        inside = any(old.startswith(f"{name}.") for old in table()["modules"])
        if name not in table()["modules"] and not inside:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=inside)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Moved(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Its names are looked up when they are asked for."""


def install() -> None:
    """Let Python find modules by their old names too; asked last, so nothing else gets slower."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def renamed(owner: type, old_to_new: Mapping[str, str], aliases: bool = False) -> None:
    """Let subclass `owner`, which still defines methods by old names, be what is called today.

    To be called from `__init_subclass__` of the class whose methods were renamed. `aliases`: where
    only the new name is defined, calls of the old one reach it too.
    """
    for old, new in old_to_new.items():
        if old in vars(owner) and new not in vars(owner):
            warn(f"{owner.__qualname__}.{old}", new)
            setattr(owner, new, vars(owner)[old])
        elif aliases and new in vars(owner) and old not in vars(owner):
            setattr(owner, old, vars(owner)[new])
