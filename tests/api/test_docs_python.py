"""The examples of docs/python.md run as they stand there, with fewer steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
FEWER = {"steps=10_000": 'size="debug"', "steps=2000": 'size="debug"'}


def test_every_example_runs_in_order(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    script = "\n\n".join(blocks)
    for long, short in FEWER.items():
        script = script.replace(long, short)
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("success ") >= 2, "em.evaluate prints a success rate"
    assert (tmp_path / "outputs" / "untrained" / "policy.safetensors").exists()
