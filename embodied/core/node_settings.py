"""Mistakes in the settings of a node, found before the class is imported, which takes seconds."""

from __future__ import annotations

import inspect
import typing
from dataclasses import fields
from typing import Any

from embodied.core.build import ConfigError, Node, nearest, require_allowed, resolve
from embodied.core.config_fields import settings_of


def require_settings(name: str, node: Node) -> None:
    """Raise ConfigError for settings that the node's config dataclass does not have."""
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
            raise ConfigError(f'{name} ({target}) has no setting "{key}"{nearest(key, known)}')
        require_kind(f"{name}.{key}", known[key], value)


def require_kind(where: str, kind: str, value: Any) -> None:
    """ConfigError for a word instead of a number, and for one value instead of a list; `build`
    finds the other mistakes, after imports that take seconds."""
    number = isinstance(value, int | float)
    if kind.startswith("tuple[") and (number or isinstance(value, str)):
        raise ConfigError(f"{where}={value} should be a list: [{value}], or [{value},{value}]")
    if kind in ("int", "float") and isinstance(value, str):
        try:
            float(value)
        except ValueError as error:
            raise ConfigError(f"{where}={value!r} should be {kind}") from error


def _known_settings(target: str) -> dict[str, str] | None:
    """The settings of a class and their types as written; None for a class that takes keywords.

    Its source is read where that is enough: importing it takes seconds, and the answer to a mistake
    should not.
    """
    require_allowed(target.rpartition(".")[0], f"_target_ {target}")
    if (read := settings_of(target)) is not None:
        return {setting.name: setting.kind for setting in read}
    cls = resolve(target, object)  # only its settings are read here; `build` knows its role
    if "config" not in inspect.signature(cls).parameters:
        return None
    return {f.name: "" for f in fields(typing.get_type_hints(cls.__init__)["config"])}
