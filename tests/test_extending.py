"""docs/extending.md does what it says: its files, its commands, in a folder of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path("docs/extending.md").read_text()


def test_the_page_runs(tmp_path: Path) -> None:
    files = re.findall(r"```\w+ file=(\S+)\n(.*?)```", PAGE, re.DOTALL)
    assert len(files) == 8
    for name, text in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    commands = re.search(r"```console\n(.*?)```", PAGE, re.DOTALL)
    assert commands is not None
    bin_folder = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    script = "set -e\n" + commands[1]
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "outputs/plane/metrics.jsonl").read_text().splitlines()
    scores = [row["eval/return"] for row in map(json.loads, lines) if "eval/return" in row]
    # A point that never moves stays about 0.77 away for 20 steps: -15. The example learns to go.
    assert scores[-1] > -7
