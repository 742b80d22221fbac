"""build: instantiate a YAML node's `_target_` with a strict frozen dataclass as its config.

A node is data and may come from another person, so it cannot choose what is called: the caller says
which role it wants (`build(node, Policy)`), and only a class of an allowed package that is a
subclass of the role is built. Functions have roles too: `@registered("kinematics")`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import re
import shlex
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, cast

from embodied.core.bounds import Bound, OrName
from embodied.core.errors import ConfigError

ALLOWED = ["embodied."]  # what `_target_` may begin with; extended by `allow`
# What `allow` added: packages that the command line or Python code of this process named.
ASKED: list[str] = []
FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {}  # by role and dotted name
MANY = 40  # names: more are not listed in a message
PYTHON = "python."  # what the names of GIVEN begin with, as `_target_` and elsewhere
GIVEN: dict[str, Any] = {}  # classes, objects and functions of this process's program, by name
LONGEST = 100  # characters of a value in a message
MOST = 10**30  # larger integers are not written out: Python refuses to write those of 4,300 digits
Node = dict[str, Any]  # a nested `_target_` node, built by the class that has it as a setting
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def allow(prefix: str) -> None:
    """Allow `_target_` to name classes in the package `prefix` (a user's own), and files that came
    with data to name those of `prefix` that reach beyond this process (`core.saved_node`)."""
    package = prefix.rstrip(".") + "."
    for packages in (ALLOWED, ASKED):
        if package not in packages:
            packages.append(package)


def asked_packages() -> tuple[str, ...]:
    """The packages that `allow` added in this process: for processes that it starts."""
    return tuple(package.rstrip(".") for package in ASKED)


def give(thing: Any, place: str) -> str:
    """Make `thing`, given for the setting `place` ("policy.net"), known to settings of this
    process; returns its name there. The newest thing of a name counts."""
    own = re.sub(r"\W", "", getattr(thing, "__name__", type(thing).__name__))
    GIVEN[f"{PYTHON}{place}.{own}"] = thing
    return f"{PYTHON}{place}.{own}"


def given_thing(name: str) -> Any:
    """What a Python program gave by this name; ConfigError if it was another process."""
    if name not in GIVEN:
        raise ConfigError(
            f"{name} was given by the Python program that made this run: give it again, "
            "em.load(RUN, env=..., module=...)"
        )
    return GIVEN[name]


def require_allowed(module: str, what: str) -> None:
    """ConfigError unless settings may make this process import `module`, for `what`."""
    if not f"{module}.".startswith(tuple(ALLOWED)):
        raise ConfigError(
            f"{what} is not in an allowed package ({', '.join(ALLOWED)}); "
            f'add its package with allow=["{module.split(".")[0][:LONGEST]}"]'
        )


def shown(value: object) -> str:
    """A value of unknown type and size, shortened for a message."""
    text = repr(value) if not isinstance(value, int) or abs(value) < MOST else "a huge number"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def printable(word: str) -> str:
    """`word` in one line, shortened."""
    return word[:LONGEST] if word.isprintable() else shown(word)


def closest(word: str, words: typing.Iterable[str]) -> str | None:
    """The most similar of `words`, of any case; None if none is similar."""
    known = {each.lower(): each for each in sorted(words)}
    close = difflib.get_close_matches(word[:LONGEST].lower(), known, n=1, cutoff=0.5)
    return known[close[0]] if close else None


def nearest(word: str, words: typing.Iterable[str]) -> str:
    """The text ' (did you mean "x"?)' with the closest of `words`, else with all of them, or some
    where there are many."""
    words = sorted(words)
    if (close := closest(word, words)) is not None:
        return f' (did you mean "{close}"?)'
    if len(words) > MANY:
        like = difflib.get_close_matches(word, words, 5, cutoff=0.0)
        return f" (of {len(words)}, the nearest are: {', '.join(like)})"
    return f" (known: {', '.join(words)})" if words else " (none are known)"


def unknown(
    line: str, word: str, known: typing.Iterable[str], end: str = "", key: str | None = None
) -> ConfigError:
    """The error for a `word` that is none of `known`: `line`, the nearest known word, `end`. `key`:
    the setting whose value is the word; None where the word is a setting itself."""
    words = tuple(sorted(known))
    message = f"{line}{nearest(word, words)}{end}"
    hint = closest(word, words)
    return ConfigError(message, key=key or word, value=word, allowed=words, hint=hint)


def resolve(target: str, role: type[T]) -> type[T]:
    """The class that `target` ("embodied.policies.gaussian.Gaussian") names; ConfigError unless it
    is a subclass of `role` that is defined in that module, in an allowed package, or was given."""
    if target.startswith(PYTHON):
        thing = given_thing(target)
        kind: type[Any] = thing if isinstance(thing, type) else type(thing)
        if role in kind.__mro__:
            return kind
        raise ConfigError(f"{target} is no {role.__name__}")
    module, name = _module_of(target), target.rpartition(".")[2]
    found = vars(module).get(name)
    if not inspect.isclass(found):
        classes = [n for n, value in vars(module).items() if inspect.isclass(value)]
        raise unknown(f"{module.__name__} has no class {name}", name, classes, key="_target_")
    if found.__module__ != module.__name__:
        raise ConfigError(
            f"_target_ {target} is defined elsewhere: write {found.__module__}.{found.__qualname__}"
        )
    if role not in found.__mro__:
        raise ConfigError(
            f"_target_ {target} is no {role.__name__}; if it should be one, write "
            f"`class {name}({role.__name__})` (from {role.__module__} import {role.__name__})"
        )
    return cast(type[T], found)


def kind_of(node: Any, role: type[T]) -> type[T]:
    """The class that the `_target_` of `node` names (see `resolve`); ConfigError."""
    if not isinstance(node, Mapping):
        raise ConfigError(f"{role.__name__} should be a mapping with _target_, not {shown(node)}")
    settings = cast(Mapping[str, Any], node)
    if "_target_" not in settings:
        raise ConfigError(f"a node with keys {shown(sorted(settings))} has no _target_")
    if not isinstance(settings["_target_"], str):
        raise ConfigError(f"_target_={shown(settings['_target_'])} should be a dotted name")
    return resolve(settings["_target_"], role)


def registered(role: str) -> Callable[[F], F]:
    """Decorator: settings may name this function where a `role` ("kinematics") is asked for."""

    def register(function: F) -> F:
        FUNCTIONS[role, f"{function.__module__}.{function.__qualname__}"] = function
        return function

    return register


def named_function(target: str, role: str) -> Callable[..., Any]:
    """The function `target` of an allowed package, registered for `role`; ConfigError."""
    _module_of(target)
    if (role, target) not in FUNCTIONS:
        known = [name for kind, name in FUNCTIONS if kind == role]
        remedy = f'@registered("{role}") above it (from embodied.core.build import registered)'
        raise unknown(f'{target} is no function for "{role}"', target, known, f"; write {remedy}")
    return FUNCTIONS[role, target]


def _module_of(target: str) -> types.ModuleType:
    if not all(part.isidentifier() for part in target.split(".")):
        raise ConfigError(f"_target_ {printable(target)} is no dotted name of Python")
    module_name = target.rpartition(".")[0]
    require_allowed(module_name, f"_target_ {printable(target)}")
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            line = f"_target_ {target}: there is no module {error.name}"
            raise ConfigError(line, key="_target_", value=target) from error
        if not str(error).startswith("No module named"):  # the module says what to install
            raise ConfigError(str(error)) from error
        raise ConfigError(
            f"{target} needs the package {error.name}: pip install {error.name} "
            '(or pip install "embodied-rl[all]")'
        ) from error


def needed(module: str, what: str, extra: str) -> Any:
    """The optional package's `module`; ConfigError says that `what` needs the `extra` of ours."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f'{what}: pip install "embodied-rl[{extra}]"') from error


def build(node: Mapping[str, Any], role: type[T], /, **context: Any) -> T:
    """Instantiate the class of `node`, a subclass of `role` (see `resolve`).

    `node["_target_"]` names a class whose `__init__` takes `config: Config`, a frozen dataclass,
    and, by name, any of `context` (spec, policy, device, ...). All other keys of the node are
    fields of that dataclass; an unknown key or a value of the wrong type raises ConfigError. A
    class without a `config` parameter gets the keys as keyword arguments. The object's `.node` is
    a plain copy of the node.
    """
    cls: Any = kind_of(node, role)
    target = node["_target_"]
    settings = {key: value for key, value in node.items() if key != "_target_"}
    if role in type(GIVEN.get(target)).__mro__:  # an object
        return GIVEN[target]
    parameters = inspect.signature(cls).parameters
    given = {key: value for key, value in context.items() if key in parameters}
    if "config" not in parameters:
        known = parameters.keys() - context.keys()
        if wrong := sorted(settings.keys() - known):
            raise unknown(f'{target} has no setting "{printable(wrong[0])}"', wrong[0], known)
        made = cls(**settings, **given)
        if target in GIVEN:
            made.node = plain(node)
        return made
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


def parse(config_type: Any, settings: Mapping[str, Any], where: str, joint: str = ": ") -> Any:
    """A dataclass instance from plain settings. Raises ConfigError for an unknown key, with the
    most similar known key, for a value of another type, and for a number outside of its bound.
    Messages begin with `where`, `joint` and the key."""
    hints = typing.get_type_hints(config_type, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(config_type)}
    for key in settings:
        if key not in fields:
            raise unknown(f'{where} has no setting "{printable(key)}"', key, fields)
    values = {k: typed(hints[k], v, f"{where}{joint}{k}") for k, v in settings.items()}
    missing = [
        name
        for name, f in fields.items()
        if name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where} needs {', '.join(missing)}", key=missing[0])
    return config_type(**values)


def shell_words(line: str, where: str) -> list[str]:
    """The words of a command line, as a shell splits them; ConfigError begins with `where`."""
    try:
        return shlex.split(line)
    except ValueError as error:  # a quotation mark without its second
        raise ConfigError(f"{where} cannot be split into words ({error}): {shown(line)}") from error


def plain(value: Any) -> Any:
    """Convert mappings and sequences to dict and list, recursively, so that YAML can write them."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(Sequence[Any], value)]
    return value


def typed(hint: Any, value: Any, where: str) -> Any:
    """`value` as type `hint`; only lossless conversions (int to float, list to tuple). Raises
    ConfigError for another type and for a number outside of its bound. `where` names the setting:
    "learner.gamma", or "package.Class: gamma"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return plain(value)
    if origin is Annotated:
        return _annotated(args[0], args[1:], value, where)
    if origin in (Union, types.UnionType):
        return _any_of(args, value, where)
    if origin is Literal:
        if value in args:
            return value
        words, word = [str(arg) for arg in args], str(value)[:LONGEST]
        line = f"is not allowed{nearest(word, words)}"
        raise refused(where, value, line, args, closest(word, words))
    if isinstance(value, Mapping):
        settings = cast(Mapping[str, Any], value)
        if dataclasses.is_dataclass(hint):
            return parse(hint, settings, where, ".")
        if origin in (dict, Mapping):
            return {str(k): typed(args[1], v, where) for k, v in settings.items()}
    if isinstance(value, list | tuple):
        items = cast(Sequence[Any], value)
        if origin is tuple:
            hints = (args[0],) * len(items) if args[-1] is Ellipsis else args
            if len(hints) != len(items):
                line = f"needs {len(hints)} values, got {shown(list(items))}"
                raise refused(where, items, line, f"list of {len(hints)}", shows=False)
            return tuple(typed(h, item, where) for h, item in zip(hints, items, strict=True))
        if origin is list:
            return [typed(args[0], item, where) for item in items]
    # YAML 1.1 reads 1e-3 as a string.
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)
        except (OverflowError, ValueError) as error:
            how = "too large for" if isinstance(error, OverflowError) else "not"
            raise refused(where, value, f"is {how} a number", "float") from error
    if hint is int and (whole := _whole(cast(object, value))) is not None:
        value = whole
    if origin is tuple and isinstance(value, int | float | str):
        text = shown(value)
        raise refused(where, value, f"should be a list: [{text}], or [{text},{text}]", "list")
    kind: Any = origin or hint
    if hint is int and isinstance(value, int) and abs(value) >= 2**63:
        raise refused(where, value, "is too large", "int")
    if (hint is int and isinstance(value, bool)) or not isinstance(value, kind):
        name = getattr(hint, "__name__", str(hint))
        holds = kind in (dict, Mapping) or dataclasses.is_dataclass(kind)
        line = f"should hold settings ({where}.KEY=VALUE)" if holds else f"should be {name}"
        raise refused(where, cast(Any, value), line, name)
    return cast(Any, value)


def _annotated(hint: Any, notes: tuple[Any, ...], value: Any, where: str) -> Any:
    """A number within its `Bound`, or the name of a node (`OrName`)."""
    if isinstance(value, str) and any(isinstance(note, OrName) for note in notes):
        return value
    number = typed(hint, value, where)
    for note in notes:
        if isinstance(note, Bound) and not note.holds(number):
            raise refused(where, value, f"should be {note.text}", note)
    return number


def refused(
    where: str, value: Any, line: str, allowed: Any, hint: str | None = None, shows: bool = True
) -> ConfigError:
    """The error for a value that a setting may not have: `where`, the value if it `shows`, `line`.
    Its key is "gamma" of "learner.gamma" and of "package.Class: gamma"."""
    key = where.rpartition(": ")[2].rpartition(".")[2]
    message = f"{where}={shown(value)} {line}" if shows else f"{where} {line}"
    return ConfigError(message, key=key, value=value, allowed=allowed, hint=hint)


def _whole(value: object) -> int | None:
    """A whole number that was written as 1e5 or 100000.0; None for another value."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d{1,2}", value):
        value = float(value)  # YAML 1.1 reads 1e5 as a string
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _any_of(options: tuple[Any, ...], value: Any, where: str) -> Any:
    """`value` as the first of the types `options` that takes it. A number out of the bound of one
    of them is the error that is raised, else that of the last."""
    if value is None and type(None) in options:
        return None
    problems: list[ConfigError] = []
    for option in options:
        if option is not type(None):
            try:
                return typed(option, value, where)
            except ConfigError as error:
                problems.append(error)
    bounds = (problem for problem in problems if isinstance(problem.allowed, Bound))
    raise next(bounds, problems[-1])
