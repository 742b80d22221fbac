"""What a run folder holds for the viewer: its environment, its checkpoints, how chunks are run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied.core.build import ConfigError
from embodied.core.saved_node import read_run_settings, require_inside

HOST = "127.0.0.1"
"""The default address to listen on: this machine only."""


class ViewerError(ConfigError):
    """The viewer cannot do what was asked; the message is one line that says what to type."""


@dataclass(frozen=True)
class Run:
    """A run folder as the viewer needs it.

    `env` is the environment's configuration, `execute` the number of steps of each action chunk
    that are executed (None: all), `checkpoints` the checkpoint folders, oldest first, `chosen` the
    one to start with, `folder` the run folder itself.
    """

    env: dict[str, Any]
    execute: int | None
    checkpoints: tuple[Path, ...]
    chosen: Path
    folder: Path

    @property
    def name(self) -> str:
        folder = self.folder.resolve()
        # `embodied improve` keeps the run of each way in WAY/run.
        return folder.parent.name if folder.name == "run" else folder.name


def read_run(path: Path, env_node: Mapping[str, Any] | None = None) -> Run:
    """Read the run at `path`, a run folder or one of its checkpoint folders.

    `env_node` replaces the run's environment. Raises ViewerError if `path` is not a run, and
    CheckpointError if it has no checkpoint.
    """
    from embodied.core.checkpoint import find

    if not path.is_dir():
        raise ViewerError(f"{path} is not a folder; give a run folder (it contains run.yaml)")
    chosen = find(path)
    root = path if chosen != path else path.parent.parent
    file, node = root / "run.yaml", {}
    if file.exists():
        try:
            node = read_run_settings(file)
        except ConfigError as error:
            raise ViewerError(str(error)) from error
    elif env_node is None:
        raise ViewerError(f"{root} has no run.yaml; name its environment with env=...")
    if env_node is None and "env" not in node:
        raise ViewerError(f"{file} has no env; name its environment with env=...")
    every = tuple(sorted(p.parent for p in chosen.parent.glob("[0-9]*/about.json")))
    if env_node is None:
        if not isinstance(node["env"], dict):
            raise ViewerError(f"{file}: env should hold settings; name one with env=...")
        require_inside(node["env"], file)
    env = dict(node["env"] if env_node is None else env_node)
    return Run(env, node.get("execute"), every or (chosen,), chosen, root)
