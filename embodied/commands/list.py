"""List the options of a group: envs, policies, learners, rewards, robots, experiments, ..."""

from __future__ import annotations

import argparse
import ast
import importlib.util
from pathlib import Path

import yaml

from embodied.commands import add_overrides
from embodied.core.build import ConfigError, nearest

EMPTY = ("reward", "teacher", "robot", "filter")  # groups that may have no packaged options


def add(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser, "a group, such as policies")
    parser.epilog = "examples:\n  embodied list experiments\n  embodied list policies"


def run(args: argparse.Namespace) -> None:
    from embodied.compose import options, search_folders

    folders = search_folders(args.config_dir)
    groups = {p.name for folder in folders for p in folder.iterdir() if any(p.glob("*.yaml"))}
    groups |= {*EMPTY}
    names = {plural(group): group for group in sorted(groups)}
    if not args.words:
        raise ConfigError(f"no group is given: embodied list GROUP (known: {', '.join(names)})")
    for word in args.words:
        if (group := names.get(word, word)) not in groups:
            raise ConfigError(f'there is no group "{word}"{nearest(word, names)}')
        found = options(group, folders)
        if not found:
            print(f"no options; add DIR/{group}/NAME.yaml and --config-dir DIR")
        width = max(map(len, found), default=0)
        for name, file in found.items():
            print(f"{name:{width}}   {sentence(file)}".rstrip())


def plural(group: str) -> str:
    return f"{group[:-1]}ies" if group.endswith("y") else f"{group}s"


def sentence(file: Path) -> str:
    """The description of an option: the first comment of its YAML, else its module's docstring."""
    text = file.read_text()
    comments = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    for comment in comments:
        if not comment.startswith("@package"):
            return comment
    target = str((yaml.safe_load(text) or {}).get("_target_", ""))
    return _first_line(target.rpartition(".")[0]) if target else ""


def _first_line(module: str) -> str:
    """The first line of a module's docstring, without importing it."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return ""
    if found is None or found.origin is None:
        return ""
    tree = ast.parse(Path(found.origin).read_text())
    return (ast.get_docstring(tree) or "").split("\n")[0]
