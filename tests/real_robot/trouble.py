"""Trouble: what the chaos suite does to processes from outside of them, through a mapped file."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("jump", "frozen", "blind", "wild", "dark", "broken", "force", "felt")
"""`jump` (s) of the control process's clock; else 1 for: the sensors repeat themselves; what they
say is no number; what the policy says is no number; the policy's camera gives no pictures; the
controller raises. `force` (N) on the simulated arm's plate and the time `felt` are the arm's."""


class Trouble:
    """Each name is a number that all processes see; all are 0 in a new one."""

    def __init__(self, path: Path | str, create: bool = False) -> None:
        handle = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        os.ftruncate(handle, 8 * len(NAMES))
        self._all = np.frombuffer(mmap.mmap(handle, 8 * len(NAMES)), np.float64)
        os.close(handle)

    def __getattr__(self, name: str) -> float:
        if name not in NAMES:
            raise AttributeError(name)
        return float(self._all[NAMES.index(name)])

    def __setattr__(self, name: str, value: Any) -> None:
        if name in NAMES:
            self._all[NAMES.index(name)] = value
        else:
            super().__setattr__(name, value)

    def end(self) -> None:
        """All is well again."""
        self._all[: NAMES.index("force")] = 0
