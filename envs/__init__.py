"""Simulated environments and their tasks."""

import os

# MuJoCo selects its rendering backend at first import; without a display only EGL works.
if "DISPLAY" not in os.environ:
    os.environ.setdefault("MUJOCO_GL", "egl")
