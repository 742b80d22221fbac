"""Teleoperators of the stand-in."""

from __future__ import annotations

from typing import Any

from lerobot.registry import Registry


class TeleoperatorConfig(Registry):
    """Base of configurations."""


def make_teleoperator_from_config(config: Any) -> Any:
    """As LeRobot's."""
    return config.made()
