"""What an ordinary run imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import sys
from embodied.cli import main
try:
    main({words!r}.split())
except SystemExit as stop:
    assert not stop.code, stop.code
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.parametrize("experiment", ["pendulum_sac", "pendulum_ppo"])
def test_a_run_does_not_import_the_compiler(experiment: str, tmp_path: Path) -> None:
    """It takes 1.5 to 2 s and 70 MB in every process."""
    words = f"train experiment={experiment} size=debug video=false out={tmp_path}/run"
    command = [sys.executable, "-c", RUN.format(words=words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
