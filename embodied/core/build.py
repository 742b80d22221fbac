"""build: instantiate a YAML node's `_target_` with a strict frozen dataclass as its config."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, cast

from embodied import moved

ALLOWED = ["embodied.", "envs.", "policies.", "real_robot.", "torch.optim."]
Node = dict[str, Any]  # a nested `_target_` node, built by the class that has it as a setting


class ConfigError(ValueError):
    """The configuration is wrong; the message is one line that says what to type."""


def allow(prefix: str) -> None:
    """Allow `_target_` to name classes and functions in the package `prefix` (a user's own)."""
    ALLOWED.append(prefix.rstrip(".") + ".")


def nearest(word: str, words: typing.Iterable[str]) -> str:
    """The text ' (did you mean "x"?)' with the closest of `words`, else with all of them."""
    words = sorted(words)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    if close:
        return f' (did you mean "{close[0]}"?)'
    return f" (known: {', '.join(words)})" if words else " (none are known)"


def resolve(target: str) -> Any:
    """The class or function that `target` ("policies.gaussian.Gaussian") names, if allowed."""
    if not target.startswith(tuple(ALLOWED)):
        raise ConfigError(
            f"_target_ {target} is not in an allowed package ({', '.join(ALLOWED)}); "
            f'add its package with allow=["{target.split(".")[0]}"]'
        )
    target = moved.target(target)
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ConfigError(f"_target_ {target}: there is no module {error.name}") from error
        raise ConfigError(
            f"{target} needs the package {error.name}: pip install {error.name} "
            '(or pip install "embodied-rl[all]")'
        ) from error
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f"{module_name} has no {name}{nearest(name, public)}")
    return getattr(module, name)


def build(node: Mapping[str, Any], **context: Any) -> Any:
    """Instantiate the class of `node`.

    `node["_target_"]` names a class whose `__init__` takes `config: Config`, a frozen dataclass,
    and, by name, any of `context` (spec, policy, device, ...). All other keys of the node are
    fields of that dataclass; an unknown key or a value of the wrong type raises ConfigError. A
    class without a `config` parameter (torch.optim.Adam) gets the keys as keyword arguments. The
    object's `.node` is a plain copy of the node.
    """
    if "_target_" not in node:
        raise ConfigError(f"a node with keys {sorted(node)} has no _target_")
    target = moved.target(str(node["_target_"]))
    cls = resolve(target)
    given_settings = {key: value for key, value in node.items() if key != "_target_"}
    settings = moved.settings(target, given_settings)
    parameters = inspect.signature(cls).parameters
    given = {key: value for key, value in context.items() if key in parameters}
    if "config" not in parameters:
        return cls(**settings, **given)
    config_type = typing.get_type_hints(cls.__init__)["config"]
    missing = [
        name
        for name, parameter in parameters.items()
        if name not in given and name != "config" and parameter.default is parameter.empty
    ]
    if missing:
        raise ConfigError(f"{target} cannot be built here: it needs {', '.join(missing)}")
    built = cls(parse(config_type, settings, target), **given)
    built.node = plain(node)
    return built


def parse(config_type: Any, settings: Mapping[str, Any], where: str) -> Any:
    """A dataclass instance from plain settings, type-checked; an unknown key raises ConfigError
    with the most similar known key. `where`: prefix for messages."""
    hints = typing.get_type_hints(config_type)
    fields = {f.name: f for f in dataclasses.fields(config_type)}
    for key in settings:
        if key not in fields:
            raise ConfigError(f'{where} has no setting "{key}"{nearest(key, fields)}')
    values = {k: _typed(hints[k], v, f"{where}: {k}") for k, v in settings.items()}
    missing = [
        name
        for name, f in fields.items()
        if name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where} needs {', '.join(missing)}")
    return config_type(**values)


def plain(value: Any) -> Any:
    """Convert mappings and sequences to dict and list, recursively, so that YAML can write them."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(Sequence[Any], value)]
    return value


def _typed(hint: Any, value: Any, where: str) -> Any:
    """`value` as type `hint`; only lossless conversions (int to float, list to tuple)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return plain(value)
    if origin in (Union, types.UnionType):
        return _any_of(args, value, where)
    if origin is Literal:
        if value in args:
            return value
        words = [str(arg) for arg in args]
        raise ConfigError(f"{where}={value!r} is not allowed{nearest(str(value), words)}")
    if isinstance(value, Mapping):
        settings = cast(Mapping[str, Any], value)
        if dataclasses.is_dataclass(hint):
            return parse(hint, settings, where)
        if origin in (dict, Mapping):
            return {str(k): _typed(args[1], v, where) for k, v in settings.items()}
    if isinstance(value, list | tuple):
        items = cast(Sequence[Any], value)
        if origin is tuple:
            return _typed_tuple(args, items, where)
        if origin is list:
            return [_typed(args[0], item, where) for item in items]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads 1e-3 as a string.
        try:
            return float(value)
        except ValueError as error:
            raise ConfigError(f"{where}={value!r} is not a number") from error
    kind: Any = origin or hint
    if (hint is int and isinstance(value, bool)) or not isinstance(value, kind):
        name = getattr(hint, "__name__", str(hint))
        raise ConfigError(f"{where}={value!r} should be {name}")
    return cast(Any, value)


def _typed_tuple(hints: tuple[Any, ...], items: Sequence[Any], where: str) -> tuple[Any, ...]:
    if hints[-1] is Ellipsis:
        hints = (hints[0],) * len(items)
    if len(hints) != len(items):
        raise ConfigError(f"{where} needs {len(hints)} values, got {list(items)!r}")
    return tuple(_typed(hint, item, where) for hint, item in zip(hints, items, strict=True))


def _any_of(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    problems: list[str] = []
    for option in options:
        if option is not type(None):
            try:
                return _typed(option, value, where)
            except ConfigError as error:
                problems.append(str(error))
    raise ConfigError(problems[-1])
