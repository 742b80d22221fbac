"""Names of observations; plain Python, for this process and for workers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

CRITIC_ONLY = ("privileged", "critic")
"""Simulators mark observations for critics so, for example `privileged_state` (Playground)."""
WORDS = re.compile("[A-Z]?[a-z0-9]+|[A-Z]+")
GROUPS = {"actor": "state", "policy": "state"}


def flat_name(path: tuple[str, ...], alone: str) -> str:
    """The name of a leaf of nested observations; `alone` where there is no path.

    A word anywhere in it that marks the leaf for critics becomes the prefix that hides it from
    policies: `privileged_state` is `privileged/state`, `critic` is `critic/state`.
    """
    for at, part in enumerate(path):
        words = WORDS.findall(part)
        for mark in CRITIC_ONLY:
            if mark in (word.lower() for word in words):
                rest = "_".join(word for word in words if word.lower() != mark)
                named = (*path[:at], rest, *path[at + 1 :])
                return "/".join((mark, *filter(None, named))) if any(named) else f"{mark}/state"
    return "/".join(path) or alone


def grouped(obs: Mapping[str, Any]) -> dict[str, Any]:
    """Observation groups of mjlab, of one value or of several by name: `actor` is `state`."""
    flat: dict[str, Any] = {}
    for group, value in obs.items():
        parts = value if isinstance(value, Mapping) else {"": value}
        for term, part in parts.items():
            path = (GROUPS.get(group, group), term)
            flat[flat_name(tuple(filter(None, path)), "state")] = part
    return flat
