"""What a user types for a policy on another machine: ws://HOST:PORT, or a YAML file with more."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from embodied.core.build import ConfigError, Node, allow, build, plain
from embodied.core.files import MALFORMED
from embodied.core.saved_node import require_inside

if TYPE_CHECKING:  # torch is imported when a policy is built, not when a word is read
    from embodied.core.policy import Policy
    from embodied.core.spec import Spec

TARGET = "embodied.policies.remote.policy.RemotePolicy"
PACKAGE = "embodied.policies.remote"
SCHEMES = ("ws://", "wss://")
LEAF = {"dtype": "float32", "low": None, "high": None, "unit": "", "names": []}


def is_address(word: str | None) -> bool:
    """Whether `word`, typed where a run is expected, means a policy server."""
    if word is None:
        return False
    return word.startswith(SCHEMES) or (word.endswith(".yaml") and Path(word).is_file())


def allow_typed(words: Iterable[str]) -> None:
    """Allow policy servers in this process if one of `words` ("init=ws://...") names one: who types
    an address wants it to be reached, while a file that names one is not believed."""
    if any(is_address(word.rpartition("=")[2]) for word in words):
        allow(PACKAGE)


def remote_policy(
    word: str, spec: Spec | None = None, mapping_file: str | None = None, **settings: Any
) -> Policy:
    """The policy of a server; ConfigError unless the command line allows it (`allow_typed`).
    `settings` are those of `RemotePolicy` that differ from what is written."""
    from embodied.core.policy import Policy

    require_inside({"_target_": TARGET}, word)
    node, own = remote_node(word)
    node = with_mapping({**node, **settings}, mapping_file)
    return build(node, Policy, spec=own if spec is None else spec)


def with_mapping(node: Node, file: str | None) -> Node:
    """The node of a served policy with the names and units of a mapping file (None: its own)."""
    if file is None:
        return node
    from embodied.datasets.mapping import Mapping

    Mapping.load(file)  # refuses a file that is none, in one line
    return {**node, "mapping": yaml.safe_load(Path(file).read_text())}


def remote_node(word: str) -> tuple[dict[str, Any], Spec | None]:
    """The node of the policy at an address, or of a YAML file with its settings; and the spec of
    that file, for a server that does not say it."""
    if word.startswith(SCHEMES):
        return {"_target_": TARGET, "url": word}, None
    try:
        node = yaml.safe_load(Path(word).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{word} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(node, dict) or not isinstance(node.get("url"), str):
        raise ConfigError(f"{word} should say `url: ws://HOST:PORT` of a policy server")
    node = {**plain(node), "_target_": TARGET}
    spec = node.pop("spec", None)
    return node, None if spec is None else _spec(spec, word)


def _spec(node: Any, where: str) -> Spec:
    from embodied.core.spec import Spec

    try:
        leaves = {name: {**LEAF, **leaf} for name, leaf in node["obs"].items()}
        act = {**LEAF, "low": -1.0, "high": 1.0, **node["act"]}
        rest = {"dt": float(node["dt"]), "task": None, "text": node.get("text", "")}
        return Spec.from_json({"obs": leaves, "act": act, **rest})
    except (*MALFORMED, OverflowError) as error:
        raise ConfigError(
            f"{where}: spec should be {{obs: {{NAME: {{shape: [7], names: [...]}}}}, "
            "act: {shape: [7], names: [...]}, dt: SECONDS}"
        ) from error
