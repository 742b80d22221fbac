"""How this process starts other Python processes, and which folders modules are imported from."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def module_command(module: str, *words: str) -> list[str]:
    """The command line that runs `module` with this Python. `-P` keeps the current folder out of
    the child's `sys.path`: a `json.py` that lies there is not run."""
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


def interrupt_with_parent() -> None:
    """In a new process before it begins: it hears SIGINT, which the thread that starts it may
    block, and on Linux is sent one when that thread or its process dies."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _at_parents_death(signal.SIGINT)


def outlive_parent() -> None:
    """No more signals come from a parent that dies, which sends one for each of its threads."""
    _at_parents_death(0)


def _at_parents_death(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
