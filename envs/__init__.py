"""Simulated environments and their tasks."""

import ctypes
import os
import sys


def load_egl() -> bool:
    """Whether EGL is here, loaded where the libraries of EnvPool look for it when they are loaded:
    without it, to draw ends the process."""
    try:
        ctypes.CDLL("libEGL.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


ENVPOOL_DRAWS = "envpool" not in sys.modules and sys.platform == "linux" and load_egl()
# MuJoCo selects its rendering backend at first import. Without a display: EGL; without its library
# none, as importing MuJoCo would fail (training without images needs no rendering).
if sys.platform == "linux" and not {"DISPLAY", "MUJOCO_GL"} & set(os.environ):
    os.environ["MUJOCO_GL"] = "egl" if load_egl() else "disable"
