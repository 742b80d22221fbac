"""Nodes with the default of every setting that they leave out, read from the source of the class.

What the source does not tell is left out here too: `build` has the class's own default for it.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Union, cast

from embodied.core.build import ConfigError, Node, require_allowed, resolve, typed, unknown
from embodied.core.config_fields import Setting, fields_of, settings_of


def complete(value: Any) -> Any:
    """`value` with every node in it, at any depth, completed."""
    if isinstance(value, list | tuple):
        return [complete(item) for item in cast(Sequence[Any], value)]
    if not isinstance(value, Mapping):
        return value
    node = cast(Mapping[str, Any], value)
    settings = _settings(node.get("_target_"))
    if settings is None:
        return {key: complete(item) for key, item in node.items()}
    return with_defaults(settings, node)


def with_defaults(settings: Sequence[Setting], node: Mapping[str, Any]) -> Node:
    """`node` with the defaults of `settings` for those that it does not have, in their order."""
    made: Node = {"_target_": node["_target_"]} if "_target_" in node else {}
    for setting in settings:
        if setting.name in node:
            made[setting.name] = _complete_as(setting.kind, node[setting.name])
            continue
        try:
            made[setting.name] = _complete_as(setting.kind, setting.value())
        except LookupError:
            continue
    return made | {key: complete(item) for key, item in node.items() if key not in made}


def _settings(target: Any) -> list[Setting] | None:
    """The settings of the class `target`, if settings may name it and its source tells them."""
    if not isinstance(target, str):
        return None
    try:
        require_allowed(target.rpartition(".")[0], target)
    except ConfigError:  # `build` says so
        return None
    return settings_of(target)


def _complete_as(kind: Any, value: Any) -> Any:
    """`value`, a setting of the type `kind`, completed: a dataclass inside of one has defaults."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(value, Mapping) and "_target_" not in value:
        node = cast(Mapping[str, Any], value)
        if is_dataclass(kind):
            return with_defaults(fields_of(kind), node)
        if origin in (dict, Mapping) and len(args) == 2:
            return {key: _complete_as(args[1], item) for key, item in node.items()}
    if isinstance(value, list | tuple) and origin in (tuple, list) and args:
        items = cast(Sequence[Any], value)
        kinds = args if len(args) == len(items) and ... not in args else (args[0],) * len(items)
        return [_complete_as(each, item) for each, item in zip(kinds, items, strict=True)]
    if origin in (Union, types.UnionType):
        fitting = [each for each in args if _holds(each, value)]
        return _complete_as(fitting[0], value) if fitting else complete(value)
    return complete(value)


def _holds(kind: Any, value: Any) -> bool:
    """Whether `kind` is a type of mappings or sequences and `value` is one of these."""
    origin = typing.get_origin(kind) or kind
    if isinstance(value, Mapping):
        return is_dataclass(kind) or origin in (dict, Mapping)
    return isinstance(value, list | tuple) and origin in (tuple, list)


def require_settings(name: str, node: Node) -> None:
    """Raise ConfigError for settings that the node's config dataclass does not take: another name,
    another type, a number outside of its bound. It is not imported, which takes seconds."""
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
