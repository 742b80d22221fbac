"""MuJoCo's rendering backend on a machine without a display, and without EGL's library."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from embodied import envs

HEADLESS = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "MUJOCO_GL")}
NO_EGL = """
import ctypes
real = ctypes.CDLL
class Without(real):
    def __init__(self, name=None, *rest, **more):
        if name and "EGL" in str(name):
            raise OSError("no such file")
        super().__init__(name, *rest, **more)
ctypes.CDLL = ctypes.cdll._dlltype = Without
import torch
from embodied.envs.fr3.env import Fr3
from embodied.core.build import build
from embodied.core.env import VecEnv
env = build({"_target_": "embodied.envs.fr3.env.Fr3", "num_envs": 1}, VecEnv)
env.reset(seed=0)
env.step(torch.zeros(1, env.spec.act.size))
try:
    env.render()
except Exception as error:
    print(type(error).__name__, error)
"""


def test_without_egl_environments_step_and_say_what_rendering_needs() -> None:
    """`import mujoco` with MUJOCO_GL=egl raises where EGL's library is missing."""
    ended = subprocess.run(
        [sys.executable, "-c", NO_EGL], env=HEADLESS, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("NoDisplay"), ended.stdout
    assert "install libegl1" in ended.stdout


def test_egl_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    assert envs.headless_backend() == "egl"
