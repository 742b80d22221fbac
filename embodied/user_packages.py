"""Makes packages in the current folder importable, and warns about names that clash with ours."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
OURS = ("embodied", "envs", "policies", "configs", "real_robot")


def import_from_here() -> None:
    """Append the current folder to `sys.path`, after all installed packages.

    Warns in one line if a package in it has the name of one of ours, and says which one is used.
    """
    here = Path.cwd()
    if str(here) not in sys.path:
        sys.path.append(str(here))
    for name in OURS:
        if (user := _package(here, name)) and (line := _shadow(name, user)):
            _warn_once(line)


def _package(here: Path, name: str) -> Path | None:
    """The user's module or package `name`; a folder without Python files is neither."""
    if (here / f"{name}.py").exists():
        return here / f"{name}.py"
    return here / name if any((here / name).glob("*.py")) else None


def _shadow(name: str, user: Path) -> str | None:
    """The warning, if `user` is a different package from the installed `name`."""
    known = importlib.util.find_spec(name)
    places = [*(known.submodule_search_locations or []), known.origin] if known else []
    if user.resolve() == (ROOT / name).resolve():
        return None
    if any(place and Path(place).resolve() == user.resolve() for place in places):
        return f"{user} hides embodied's own package {name}: rename it, or start elsewhere"
    return f"{user} is not imported: embodied has a package {name}; rename yours to use it"


class ShadowWarning(UserWarning):
    """A user's module has the name of one of ours."""


@cache
def _warn_once(line: str) -> None:
    warnings.warn(line, ShadowWarning, stacklevel=4)
