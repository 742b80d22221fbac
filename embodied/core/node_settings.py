"""Mistakes in the settings of a node, found before the class is imported, which takes seconds."""

from __future__ import annotations

import inspect
import typing
from typing import Any

from embodied.core.build import ConfigError, Node, require_allowed, resolve, typed, unknown
from embodied.core.config_fields import settings_of


def require_settings(name: str, node: Node) -> None:
    """Raise ConfigError for settings that the node's config dataclass does not take: another name,
    another type, a number outside of its bound."""
    if "_target_" not in node:
        raise ConfigError(
            f"{name}.{next(iter(node), '')} is set but no {name} is chosen: {name}=NAME"
        )
    target = str(node["_target_"])
    if (known := _known_settings(target)) is None:
        return
    given = {key: value for key, value in node.items() if key != "_target_"}
    for key, value in given.items():
        if key not in known:
            raise unknown(f'{name} ({target}) has no setting "{key}"', key, known)
        typed(known[key], value, f"{name}.{key}")


def _known_settings(target: str) -> dict[str, Any] | None:
    """The settings of a class and their types; None for a class that takes keywords.

    Its source is read where that is enough: importing it takes seconds, and the answer to a mistake
    should not.
    """
    require_allowed(target.rpartition(".")[0], f"_target_ {target}")
    if (read := settings_of(target)) is not None:
        return {setting.name: setting.kind for setting in read}
    cls = resolve(target, object)  # only its settings are read here; `build` knows its role
    if "config" not in inspect.signature(cls).parameters:
        return None
    config = typing.get_type_hints(cls.__init__)["config"]
    return typing.get_type_hints(config, include_extras=True)
