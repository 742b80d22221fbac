"""How this process starts other Python processes, and which folders modules are imported from."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def module_command(module: str, *words: str) -> list[str]:
    """The command line that runs `module` with this Python.

    `-P` keeps the current folder out of the child's `sys.path`: a `json.py` that lies there is not
    run.
    """
    return [sys.executable, "-P", "-m", module, *words]


@contextmanager
def safe_path() -> Generator[None]:
    """Within it, the processes that `multiprocessing` starts keep the current folder out of
    `sys.path` until they have this process's own; afterwards the environment is as before."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def import_from_here() -> None:
    """Append the current folder to `sys.path`, after all installed packages."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
