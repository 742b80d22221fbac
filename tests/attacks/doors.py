"""The doors where a file of somebody else comes in: what a user types, or calls, with its path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import embodied as em
from embodied import cli
from embodied.commands import checked
from embodied.core import checkpoint
from embodied.embodiments.kinematics.arm import read_arm_file
from embodied.models import dynamics
from embodied.rewards.success import model as classifier
from embodied.training.logger import read_metrics
from embodied.viewer.launch import open_session

Door = Callable[[Path, Path], object]
"""Uses the file or folder at a path; what it writes lies in another folder."""


def typed(*words: str) -> Door:
    """`embodied WORDS`, with `{path}` and `{out}` filled in."""

    def door(path: Path, out: Path) -> None:
        args = cli.parse([word.format(path=path, out=out) for word in words])
        checked(args)(args)

    return door


FORMATS = {"robomimic": (), "maniskill": (), "minari": (), "lerobot": ()}
FORMATS |= {"zarr": ("--dt", "0.1"), "rlds": ("--dt", "0.1")}
DOORS: dict[str, Door] = {
    "info": typed("demos", "info", "{path}"),
    "check": typed("demos", "check", "{path}"),
    "drop": typed("demos", "drop", "{path}", "episodes=0", "out={out}"),
    "eval": typed("eval", "{path}", "episodes=1", "num_envs=1"),
    "export": typed("export", "{path}", "--to", "{out}", "--header"),
    "adopt": typed("adopt", "{path}", "fps=30", "out={out}"),
    "describe": typed("robot", "describe", "{path}", "out={out}/arm.yaml"),
    "study": typed("study", "{path}", "out={out}"),
    "load": lambda path, out: em.load(path),
    "view": lambda path, out: open_session(path),
    "state": lambda path, out: checkpoint.load_state(path, "learner"),
    "arm": lambda path, out: read_arm_file(str(path)),
    "model": lambda path, out: dynamics.load(path),
    "classifier": lambda path, out: classifier.read(path),
    "metrics": lambda path, out: read_metrics(path),
    **{
        name: typed("demos", "convert", name, "{path}", "{out}", *more)
        for name, more in FORMATS.items()
    },
}
