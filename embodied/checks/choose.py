"""Which part a name on the command line means; imports no torch, so that a mistake costs little."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embodied.compose import is_gymnasium_id, options, search_folders
from embodied.core.build import ConfigError, Node, nearest

KINDS = ("env", "policy", "learner", "reward", "teacher", "robot")
"""What can be checked."""


def chosen_part(
    kind: str, name: str, folders: Sequence[Path | str]
) -> tuple[list[str], dict[str, Node]]:
    """The words that choose `name`, and the options that are not files."""
    known = options(kind, search_folders(folders))
    if name in known or (kind == "env" and is_gymnasium_id(name)):
        return [f"{kind}={name}"], {}
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        return [f"{kind}=as_typed"], {f"{kind}/as_typed": {"_target_": name}}
    raise ConfigError(f'there is no {kind} "{name}"{nearest(name, known)}')
