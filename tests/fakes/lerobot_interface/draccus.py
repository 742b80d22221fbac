"""Stand-in for draccus: a map becomes a dataclass."""

from __future__ import annotations

from typing import Any


def decode(cls: Any, raw: dict[str, Any]) -> Any:
    """As draccus' function of that name does for flat dataclasses."""
    return cls(**raw)
