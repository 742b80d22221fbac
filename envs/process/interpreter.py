"""The Python interpreter of an environment that lives apart."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from embodied.core.build import ConfigError


def interpreter(apart: str, given: str = "") -> str:
    """The Python of the virtual environment `apart`: `given`, else the one that the variable
    EMBODIED_<APART>_PYTHON names, else .venv-<apart>/bin/python; this one if `apart` is empty, too.
    ConfigError if it does not exist.
    """
    if not apart:
        return given or sys.executable
    variable = os.environ.get(f"EMBODIED_{apart.upper()}_PYTHON", "")
    path = given or variable or f".venv-{apart}/bin/python"
    if not Path(path).exists():
        raise ConfigError(f"{apart} is not here ({path} does not exist); {install(apart)}")
    return str(Path(path).absolute())


def install(apart: str) -> str:
    """The advice for an environment that cannot start."""
    if not apart:
        return "env.python=PATH names the interpreter that has it"
    return f"install it with: sh scripts/apart.sh {apart}"
