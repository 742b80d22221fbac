"""Simulated environments and their tasks."""

import os

# MuJoCo chooses its drawing back-end when it is first imported; without a screen only EGL works.
if "DISPLAY" not in os.environ:
    os.environ.setdefault("MUJOCO_GL", "egl")
