"""Simulated environments and their tasks."""

import ctypes
import os
import sys


def headless_backend() -> str:
    """MuJoCo's rendering backend without a display: EGL; without its library none, as importing
    MuJoCo would fail (training without images needs no rendering)."""
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError:
        return "disable"
    return "egl"


# MuJoCo selects its rendering backend at first import.
if sys.platform == "linux" and not {"DISPLAY", "MUJOCO_GL"} & set(os.environ):
    os.environ["MUJOCO_GL"] = headless_backend()
