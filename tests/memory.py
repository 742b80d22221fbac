"""Memory of a long test process: what the tests of an environment used goes back to the system.

Closed simulators stay in cycles of references, and glibc keeps what was freed in the arenas of
their threads: without this a worker grows to 6 GB.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import pytest

GROWTH = 150 * 2**20  # bytes since the last time, from which on it is worth 0.3 s
STATM = Path("/proc/self/statm")
PAGE = 4096  # bytes


def resident() -> int:
    """The memory of this process, in bytes."""
    return int(STATM.read_text().split()[1]) * PAGE


class Memory:
    """A plugin that collects garbage after a test with which the process has grown."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None)
        self.libc.mallopt(-8, 2)  # M_ARENA_MAX: two arenas for all threads
        self.before = resident()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> object:
        result = yield
        if resident() > self.before + GROWTH:
            gc.collect()
            self.libc.malloc_trim(0)
            self.before = resident()
        return result


def register(config: pytest.Config) -> None:
    """Only where the C library is glibc."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        config.pluginmanager.register(Memory(), "memory")
