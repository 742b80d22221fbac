"""What the fuzzer found once, and the tries that reach most of what it reached: all are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.attacks.fuzz import kept
from tests.builders import ROOT
from tests.tiers import only_all

SLOW = {
    *("adopt-act", "adopt-diffusion", "check", "classifier", "drop", "eval", "export", "info"),
    *("lerobot", "maniskill", "minari", "mjcf", "rlds", "robomimic", "study", "urdf", "view"),
    *("resume", "zarr"),
}


def require_right(*names: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.attacks.fuzz", "--replay", *names],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert not wrong, "\n".join(wrong)


@only_all  # a sample of them: test_files.py
def test_no_kept_try_is_wrong() -> None:
    require_right(*sorted({name for name, _ in kept()} - SLOW))


@only_all
def test_no_kept_try_of_a_slow_door_is_wrong() -> None:
    require_right(*sorted(SLOW))
