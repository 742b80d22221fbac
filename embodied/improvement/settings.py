"""Settings of an improvement: those of its words, or of the folder in which it began."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from embodied.compose import compose
from embodied.core import checkpoint
from embodied.core.build import ConfigError, Node
from embodied.core.saved_node import read_saved
from embodied.evaluation.loading import trained_with
from embodied.policies.remote.address import allow_typed, is_address

SETTINGS = "improve.yaml"
"""The file of the settings, in the folder of the improvement."""


def improvement_settings(policy: str, words: Sequence[str], folders: Sequence[str]) -> Node:
    """The settings as a plain dictionary: those of a folder that is gone on with, or new ones."""
    allow_typed([policy])
    kept = Path(policy) / SETTINGS
    allowed = [word for word in words if word.startswith("allow=")]
    if kept.is_file():
        if len(allowed) < len(words):
            raise ConfigError(f"{policy} goes on as it began; out=DIR begins another one")
        node = read_saved(kept)
        compose("improve", [*allowed, "env=as_trained"], folders, {"env/as_trained": node["env"]})
        return node
    given: dict[str, Node] = {}
    named = any(word.startswith("env=") for word in words)
    if not is_address(policy) and not named:
        env = trained_with(checkpoint.find(policy)).get("env")
        given = {"env/as_trained": env} if env else {}
    if not named and not given:
        raise ConfigError(f"name the environment: embodied improve {policy} env=NAME")
    node = compose("improve", words, folders, given).node
    short = "served" if is_address(policy) else Path(policy).resolve().name
    node |= {"policy": policy, "out": node["out"] or str(Path("outputs") / f"{short}-improved")}
    return node


def joined_at(node: Node) -> Path | None:
    """Where the policy is kept as it acts in the environment: with the names and units of
    `mapping=`, told to do `task=`. None without these settings."""
    if node.get("mapping") is None and node.get("task") is None:
        return None
    return Path(node["out"]) / ("joined.yaml" if is_address(node["policy"]) else "joined")


def remember(out: Path, node: Node) -> None:
    """Keep the settings in `out`; ConfigError where there are others."""
    file, text = out / SETTINGS, yaml.safe_dump(node, sort_keys=False)
    if file.exists() and yaml.safe_load(file.read_text()) != yaml.safe_load(text):
        raise ConfigError(f"{out} is an improvement with other settings; choose another: out=DIR")
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
