"""Imports MuJoCo Warp without its banner, with a one-line error if it is not installed."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MISSING = "MuJoCo Warp is not installed; type: pip install 'embodied-rl[warp]'"
NO_DRIVER = b"Could not find or load the NVIDIA CUDA driver"

try:
    import warp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(MISSING, name="warp") from error


def _without_driver_warning(start: Callable[[], None]) -> None:
    """Call `start`; what native code says about a machine without a GPU is not passed on."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            start()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            others = [line for line in said if NO_DRIVER not in line]
            os.write(2, b"".join(others))


# Warp greets at its start and then names every kernel that it loads.
warp.config.log_level = max(warp.config.log_level, warp.LOG_ERROR)
_without_driver_warning(warp.init)

try:
    import mujoco_warp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(MISSING, name="mujoco_warp") from error

__all__ = ["mujoco_warp", "tell_about_compiling", "warp"]


def tell_about_compiling(name: str, device: str) -> None:
    """Print at the first use on a machine that kernels are being compiled; Warp caches them."""
    built = ".o" if device == "cpu" else ".cubin"
    cache = Path(warp.config.kernel_cache_dir or ".")
    folders = cache.glob("wp_mujoco_warp._src.forward_*")
    if not any(file.suffix == built for folder in folders for file in folder.iterdir()):
        print(f"{name}: compiling MuJoCo Warp's kernels for {device}, once", file=sys.stderr)
