"""Settings given in Python as the words of a command line, so that both are checked alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast


def as_words(prefix: str, settings: Mapping[str, Any]) -> list[str]:
    """`{"lr": 1e-3, "net": {"hidden": [64]}}` below "learner" as `learner.lr=0.001 ...`."""
    words: list[str] = []
    for key, value in settings.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping) and value:
            words += as_words(name, cast(Mapping[str, Any], value))
        else:
            words.append(f"{name}={_written(value)}")
    return words


def _written(value: Any) -> str:
    """One value in Hydra's syntax."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str) and value and all(c.isalnum() or c in "_-./" for c in value):
        return value
    if isinstance(value, list | tuple):
        return "[" + ",".join(_written(each) for each in cast(list[Any], value)) + "]"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{}"
    return json.dumps(str(value))  # quoted: commas, spaces and braces have a meaning in Hydra
