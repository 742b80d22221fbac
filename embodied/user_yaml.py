"""Translates deprecated names in users' YAML files to current ones (see moved.yaml)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from embodied import moved
from embodied.core.build import Node
from embodied.core.yaml_text import parse_yaml


def with_present_names(file: Path) -> str | None:
    """The text of a YAML file with current names of options and settings; None if it uses no
    deprecated ones. ConfigError."""
    text = file.read_text()
    node = parse_yaml(text, str(file))
    if not isinstance(node, dict):
        return None
    new: Node = dict(node)
    whole = "@package _global_" in text.partition("\n")[0]
    defaults = list(node.get("defaults") or [])
    if whole and isinstance(node.get("data"), str):
        defaults.append({"override /data": new.pop("data")})
    if whole:
        new = moved.run_settings(new)
    if renamed := [_entry(each) for each in defaults]:
        new = {"defaults": renamed, **{k: v for k, v in new.items() if k != "defaults"}}
    if new == node:
        return None
    head = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("# @package"))
    return head + yaml.safe_dump(new, sort_keys=False)


def _entry(entry: Any) -> Any:
    """One entry of a `defaults:` list ("override /learner": name) with the current name."""
    if not isinstance(entry, dict):
        return entry
    made = {}
    for key, name in cast(Mapping[str, Any], entry).items():
        group = key.removeprefix("override ").strip("/").partition("@")[0]
        made[key] = moved.option(group, name) if isinstance(name, str) else name
    return made
