"""Look at a run: the robot in 3D in your browser, with play, pause and task sliders."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from embodied.commands import add_overrides, take
from embodied.core.build import ConfigError


def add(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser, "a RUN folder or a checkpoint in one; env=NAME: a world alone; port=8081")
    parser.add_argument(
        "--port", type=int, default=8080, help="as port=N: on localhost (default: 8080)"
    )
    parser.epilog = (
        "examples:\n"
        "  embodied view outputs/clone\n"
        "  embodied view outputs/clone env.task=push port=8081\n"
        "  embodied view env=fr3_insert"
    )


def run(args: argparse.Namespace) -> None:
    from embodied.viewer import serve

    port, given = take(args.words, "port")
    if port is not None and not port.isdecimal():
        raise ConfigError(f"port={port} should be a number, such as port=8081")
    runs = [word for word in given if "=" not in word or Path(word).exists()]
    words = [word for word in given if word not in runs]
    if len(runs) > 1 or not given:
        raise ConfigError("say what to view: embodied view RUN, or embodied view env=NAME")
    path = Path(runs[0]) if runs else None
    serve(path, _env(path, words, args.config_dir) if words else None, int(port or args.port))


def _env(path: Path | None, words: list[str], folders: list[str]) -> dict[str, Any]:
    """The environment that `words` say, starting from that of the run."""
    from embodied.compose import compose
    from embodied.core import checkpoint

    words = [*words, "policy=null"]  # only the world is asked for
    if path is None:
        return compose("eval", words, folders).node["env"]
    file = checkpoint.find(path).parent.parent / "run.yaml"
    trained = yaml.safe_load(file.read_text())["env"]
    return compose("eval", words, folders, {"env/as_trained": trained}).node["env"]
