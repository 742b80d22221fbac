"""How large the project is, and how far a command is from the gradient: prints one JSON object.

    python scripts/size.py

`frames` and `files` are of `embodied train experiment=pendulum_sac size=debug`: the frames of the
project's own functions on the stack at the optimiser's first step, and the project's files that
were entered (imported or called) until then.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("embodied", "envs", "policies", "real_robot")


def lines(*tops: str) -> int:
    """Lines of the Python files below the folders; links are not followed."""
    files = [file for top in tops for file in (ROOT / top).rglob("*.py")]
    return sum(file.read_bytes().count(b"\n") for file in files)


class Reached(BaseException):
    """The optimiser's first step."""


def walk() -> dict[str, int]:
    """The frames and files of one training until its first gradient step."""
    entered: set[str] = set()
    stack: list[str] = []

    @cache
    def own(name: str) -> bool:
        place = Path(name)
        return name.startswith(str(ROOT)) and place != Path(__file__) and ".venv" not in place.parts

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not own(frame.f_code.co_filename):
            return
        entered.add(frame.f_code.co_filename)
        if frame.f_code.co_qualname in ("Adam.step", "Adam.advance"):  # PyTorch's, native
            at: FrameType | None = frame
            while at is not None:
                if own(at.f_code.co_filename):
                    stack.append(at.f_code.co_qualname)
                at = at.f_back
            raise Reached

    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(watch)
        try:
            from embodied.cli import main

            main(["train", "experiment=pendulum_sac", "size=debug", f"out={folder}/run"])
        except Reached:
            sys.setprofile(None)
    return {"frames": len(stack), "files": len(entered)}


def measured() -> dict[str, int]:
    """All figures; the walk runs in a process of its own."""
    command = [sys.executable, "-P", __file__, "walk"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    walked = json.loads(done.stdout.splitlines()[-1])
    return {"product": lines(*PRODUCT), "tests": lines("tests"), **walked}


if __name__ == "__main__":
    print(json.dumps(walk() if sys.argv[1:] == ["walk"] else measured()))
