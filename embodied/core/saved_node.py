"""Reads YAML that a person wrote, and nodes that came with data (run.yaml), perhaps of a stranger.

`build` already builds only classes of the role that is asked for. What a file names must, besides,
stay inside of this process: a run that is looked at moves no robot and calls no address.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from embodied.core import build, formats
from embodied.core.build import ConfigError, Node
from embodied.core.files import SETTINGS, read_text

# What PyYAML raises, beside its own errors, for a value that its tag does not fit (`!!bool x`).
UNREADABLE = (ValueError, LookupError, AttributeError, TypeError, OverflowError)


def parse_yaml(text: str, where: str) -> Any:
    """What a YAML text holds; ConfigError that names `where` (its file) and the line."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where} is not YAML{line}: {problem}") from error
    except (*UNREADABLE, RecursionError) as error:  # a date that is none; nested without end
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{where} is not YAML ({problem})") from error


OUTSIDE = (  # packages that reach robots, devices, networks and other processes
    "embodied.real_robot.",
    "embodied.llm.client.",
    "embodied.envs.hardware_sim.",
    "embodied.envs.process.",
    "embodied.policies.remote.",
)
MOST = 100_000  # parts of one file: more are an attack, or a mistake


def read_saved(file: Path) -> Node:
    """The mapping in a YAML file of a run, a checkpoint or a dataset; ConfigError."""
    try:
        node = parse_yaml(read_text(file, SETTINGS), str(file))
        if isinstance(node, dict):
            for part in parts(node):  # Hydra would replace such a text by other settings
                if isinstance(part, str) and "${" in part:
                    raise ValueError(
                        f"it refers to other settings ({part[:60]}), and should hold values"
                    )
            return cast(Node, node)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
    raise ConfigError(f"{file} should hold settings (key: value)")


def read_run_settings(file: Path) -> Node:
    """The settings in a run.yaml, in the present format and without its number; ConfigError."""
    node = dict(read_saved(file))
    if not isinstance(node.get("env") or {}, dict):
        raise ConfigError(f"{file}: env should hold settings (key: value)")
    if not isinstance(execute := node.get("execute"), int | None):
        raise ConfigError(f"{file}: execute={build.shown(execute)} should be a number of steps")
    return formats.upgrade("run folder", node, node.pop("format", 1))


def executed_steps(saved: Path) -> int | None:
    """The steps of a chunk that the run of the checkpoint `saved` executes (None: all, no run)."""
    file = saved.parent.parent / "run.yaml"
    return read_run_settings(file).get("execute") if file.exists() else None


def require_inside(node: Any, where: Path | str) -> None:
    """ConfigError if `node`, read from `where`, names a class that reaches beyond this process, and
    the command line does not allow its package."""
    for part in parts(node):
        if isinstance(part, Mapping) and "_target_" in part:
            target: Any = cast(Node, part)["_target_"]
            if not isinstance(target, str):
                said = str(target)[:60]
                raise ConfigError(f"{where}: _target_ should name a class, not {said}")
            package = next((name for name in OUTSIDE if target.startswith(name)), None)
            if package is not None and not any(target.startswith(each) for each in build.ASKED):
                raise ConfigError(
                    f"{where} names {target}, which reaches beyond this process (a robot, a "
                    "network or another program); if you trust that file, say "
                    f'allow=["{package.rstrip(".")}"]'
                )


def parts(node: Any) -> Iterator[Any]:
    """Everything in `node`, at any depth; ValueError if there is no end of it."""
    waiting, count = [node], 0
    while waiting:
        part = waiting.pop()
        count += 1
        if count > MOST:
            raise ValueError(f"it has more than {MOST:,} parts, or contains itself")
        yield part
        if isinstance(part, Mapping):
            for key, value in cast(Mapping[Any, Any], part).items():
                waiting += [key, value]
        elif isinstance(part, list | tuple):
            waiting += cast(list[Any], part)


def python_names(node: Any) -> set[str]:
    """The names in `node` of what a Python program gave (`core.build.give`)."""
    return {part for part in parts(node) if isinstance(part, str) and part.startswith(build.PYTHON)}
