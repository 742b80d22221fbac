"""The settings of a class, read from its source without importing it: names, types, defaults.

A class that takes `config: Config` has the fields of that dataclass as settings. What a setting is
stands in the comment on the line of its field. Nodes are completed with the defaults, and mistakes
in them are found, as far as the source tells; `build` knows the rest.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast

from embodied.core import bounds
from embodied.core.build import PYTHON, ConfigError, Node, require_allowed, resolve, typed, unknown

Found = tuple["Source", ast.ClassDef]
KNOWN: dict[str, Any] = {  # what a name of these means in the type of a field
    **{name: getattr(bounds, name) for name in dir(bounds) if name[0].isupper()},
    **{kind.__name__: kind for kind in (int, float, str, bool, tuple, list, dict)},
    **{"Annotated": Annotated, "Any": Any, "Literal": Literal, "Union": Union},
    **{"Mapping": Mapping, "Sequence": Sequence},
}
PLAIN: dict[str, Any] = {  # what a name of these means in a default
    **{kind.__name__: kind for kind in (int, float, str, bool, tuple, list, dict, range)},
    **{"Any": Any, "Mapping": Mapping},
}
TWINS: dict[tuple[str, str], Any] = {}  # made by `_twin`, by module and name of the class


@dataclass(frozen=True)
class Setting:
    """One field of a dataclass.

    `kind` is its type; what the source does not tell is `Any`, and a dataclass is one of the same
    fields. `default` is as written in the source, and None where a value must be given. `says` is
    the comment on the field's line.
    """

    name: str
    kind: Any
    default: str | None
    says: str
    source: Source = field(repr=False)
    written: ast.expr | None = field(repr=False)

    def value(self) -> Any:
        """The default as a plain value; LookupError where the source does not tell it."""
        return self.source.value(self.written)


class Source:
    def __init__(self, module: str, text: str) -> None:
        self.module, self.lines, self.tree = module, text.splitlines(), ast.parse(text)
        self.classes = {n.name: n for n in self.tree.body if isinstance(n, ast.ClassDef)}
        self.imported: dict[str, tuple[str, str]] = {}  # names, with their module and name there
        self.assigned: dict[str, ast.expr] = {}  # names that the module itself gives a value
        self.defaults: dict[ast.expr | None, Any] = {}  # what `value` has found
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = (node.module, alias.name)
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.assigned[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self.assigned[ast.unparse(node.target)] = node.value

    def kind(self, written: ast.expr) -> Any:
        """The type that an annotation of this module says; `Any` where the source does not tell."""
        try:
            code = compile(ast.Expression(written), self.module, "eval")
            return eval(code, {"__builtins__": {}}, _Names(self, types=True))
        except (TypeError, AttributeError, NameError):  # a type of another library
            return Any

    def value(self, written: ast.expr | None) -> Any:
        """The plain value that an expression of this module has. Raises LookupError where it needs
        more than literals, constants, and dataclasses of these, which become dictionaries."""
        if written not in self.defaults:
            default, factory = _of_field(written)
            if factory is not None:
                made = isinstance(factory, ast.Lambda)
                default = factory.body if made else ast.Call(factory, [], [])
            self.defaults[written] = _plain(self.evaluated(default))
        return copy.deepcopy(self.defaults[written])

    def evaluated(self, written: ast.expr | None) -> Any:
        """The value of an expression, which may be a type; LookupError."""
        if written is None:
            raise LookupError("no default")
        expression = ast.fix_missing_locations(ast.Expression(written))
        try:
            code = compile(expression, self.module, "eval")
            return eval(code, {"__builtins__": {}}, _Names(self, types=False))
        except Exception as error:
            raise LookupError(ast.unparse(written)) from error

    def follow(self, name: str) -> Source | None:
        """The source of the module that `name` was imported from, if it is of this package."""
        module, there = self.imported.get(name, ("", ""))
        if module.partition(".")[0] not in ("embodied", self.module.partition(".")[0]):
            return None
        source = source_of(module)
        known = source is not None and source.has(there)
        return source if known else source_of(f"{module}.{there}")

    def has(self, name: str) -> bool:
        return name in self.classes or name in self.assigned or name in self.imported

    def find(self, name: str) -> Found | None:
        """The class that `name` or `module.name` means in this module."""
        first, _, rest = name.partition(".")
        if not rest and first in self.classes:
            return self, self.classes[first]
        if first not in self.imported:
            return None
        module, there = self.imported[first]
        source = source_of(f"{module}.{there}" if rest else module)
        return None if source is None else source.find(rest or there)


class _Names(dict[str, Any]):
    """The meaning of names in the expressions of a module: in its `types`, or in its values."""

    def __init__(self, source: Source, types: bool) -> None:
        super().__init__(KNOWN if types else PLAIN)
        self.source = source
        self.types = types

    def __missing__(self, name: str) -> Any:
        if name in self.source.classes:
            tree = self.source.classes[name]
            if self.types:
                return _twin(self.source, tree) if _is_dataclass(tree) else Any
            if _is_dataclass(tree):
                return _Maker(_settings(self.source, tree))
            raise NameError(tree.name)
        if name in self.source.assigned:
            written = self.source.assigned[name]
            return self.source.kind(written) if self.types else self.source.evaluated(written)
        there = self.source.imported.get(name, ("", name))[1]
        source = self.source.follow(name)
        if source is not None:
            names = _Names(source, self.types)
            return names[there] if source.has(there) else _Module(names)
        if self.types:
            return Any
        if name == "math":
            return math
        raise NameError(name)


class _Module:
    def __init__(self, names: _Names) -> None:
        self._names = names

    def __getattr__(self, name: str) -> Any:
        return self._names[name]


class _Maker:
    """A dataclass in a default: called, it gives its fields as a dictionary."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self._settings = {each.name: each for each in settings}

    def __call__(self, *values: Any, **named: Any) -> dict[str, Any]:
        given = {**dict(zip(self._settings, values, strict=False)), **named}
        rest = {name: each for name, each in self._settings.items() if name not in given}
        whole = given | {name: each.value() for name, each in rest.items()}
        return {name: whole[name] for name in self._settings}

    def __getattr__(self, name: str) -> Any:
        return self._settings[name].value()


def _plain(value: Any) -> Any:
    """Tuples as lists; LookupError for what a YAML file cannot hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in typing.cast(Sequence[Any], value)]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in typing.cast(dict[Any, Any], value).items()}
    raise LookupError(type(value).__name__)


def _is_dataclass(tree: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(each) for each in tree.decorator_list)


def _twin(source: Source, tree: ast.ClassDef) -> Any:
    """A dataclass with the fields of the class `tree`, whose module is not imported. Its attribute
    `settings` holds them. `Any` if the source does not tell them."""
    key = (source.module, tree.name)
    if key not in TWINS:
        TWINS[key] = Any  # of a class that has itself as a field
        try:
            settings = _settings(source, tree)
        except LookupError:
            return Any
        fields = [
            (each.name, each.kind, field() if each.default is None else field(default=None))
            for each in settings
        ]
        twin = make_dataclass(tree.name, fields, frozen=True, kw_only=True)
        twin.settings = settings  # type: ignore[attr-defined]
        TWINS[key] = twin
    return TWINS[key]


@cache
def source_of(module: str) -> Source | None:
    """The source of `module`; its packages are imported, it is not. None if it has none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Source(module, Path(spec.origin).read_text())


def settings_of(target: str) -> tuple[Setting, ...] | None:
    """The settings of the class `target` ("embodied.policies.gaussian.Gaussian"), those of bases
    first; None if the source does not show them."""
    found = config_of(target)
    if found is None:
        return None
    try:
        return _settings(*found)
    except LookupError:  # a base class whose source is not found
        return None


def fields_of(kind: Any) -> tuple[Setting, ...]:
    return kind.settings


def config_of(target: str) -> Found | None:
    """The dataclass that the class `target` takes as `config`."""
    module, _, name = target.rpartition(".")
    source = source_of(module) if module else None
    found = source and source.find(name)
    return found and _config(*found)


def _config(source: Source, kind: ast.ClassDef) -> Found | None:
    if _is_dataclass(kind):
        return source, kind
    init = next(
        (n for n in kind.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None
    )
    if init is not None:
        every = [*init.args.posonlyargs, *init.args.args, *init.args.kwonlyargs]
        hint = next((a.annotation for a in every if a.arg == "config"), None)
        return None if hint is None else source.find(ast.unparse(hint))
    for base in kind.bases:
        if (found := source.find(ast.unparse(base))) and (config := _config(*found)):
            return config
    return None


@cache
def _settings(source: Source, tree: ast.ClassDef) -> tuple[Setting, ...]:
    """The fields of a dataclass, those of its bases first; LookupError for an unknown base."""
    made: dict[str, Setting] = {}
    for base in reversed(tree.bases):
        name = ast.unparse(base)
        if (found := source.find(name)) is None:
            raise LookupError(name)
        made |= {each.name: each for each in _settings(*found)}
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign):
            continue
        if not ast.unparse(node.annotation).startswith("ClassVar"):
            name, kind = ast.unparse(node.target), source.kind(node.annotation)
            line = source.lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :]
            says, default = line.partition("#")[2].strip(), _default(node.value)
            made[name] = Setting(name, kind, default, says, source, node.value)
    return tuple(made.values())


def _of_field(written: ast.expr | None) -> tuple[ast.expr | None, ast.expr | None]:
    """The default of a field as it is written, and the function that makes one."""
    if isinstance(written, ast.Call) and ast.unparse(written.func).endswith("field"):
        given = {word.arg: word.value for word in written.keywords}
        return given.get("default"), given.get("default_factory")
    return written, None


def _default(written: ast.expr | None) -> str | None:
    """`field(default_factory=dict)` as {}, everything else as it is written."""
    default, made_by = _of_field(written)
    if made_by is None:
        return None if default is None else ast.unparse(default)
    factory = ast.unparse(made_by)
    empty = {"dict": "{}", "list": "[]", "tuple": "[]"}
    return empty.get(factory.partition("[")[0], f"{factory}()")


def in_words(kind: Any) -> str:
    """A type for people: "int, at least 1; or null"; "" for one that the source does not tell."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        limits = [
            each.text
            for each in args[1:]
            if isinstance(each, bounds.Bound) and each.text != bounds.Bound().text
        ]
        return ", ".join([in_words(args[0]), *limits])
    if origin in (Union, types.UnionType):
        words = [in_words(each) for each in args if each is not type(None)]
        known = "; or ".join(filter(None, words)) if all(words) else ""
        return f"{known}; or null" if known and type(None) in args else known
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (tuple, list):
        return "list" if not (inner := in_words(args[0])) else f"list of {inner}"
    if origin in (dict, Mapping) or kind in (dict, Mapping):
        return "mapping"
    return "" if kind is Any else str(getattr(kind, "__name__", ""))


def complete(value: Any) -> Any:
    """`value` with every node in it, at any depth, completed."""
    if isinstance(value, list | tuple):
        return [complete(item) for item in cast(Sequence[Any], value)]
    if not isinstance(value, Mapping):
        return value
    node = cast(Mapping[str, Any], value)
    settings = _allowed_settings(node.get("_target_"))
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


def _allowed_settings(target: Any) -> tuple[Setting, ...] | None:
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
    """The settings of a class and their types; None for a class that takes keywords. Its source is
    read where that is enough: importing it takes seconds, and the answer to a mistake should
    not."""
    if not target.startswith(PYTHON):
        require_allowed(target.rpartition(".")[0], f"_target_ {target}")
        if (read := settings_of(target)) is not None:
            return {setting.name: setting.kind for setting in read}
    cls = resolve(target, object)  # only its settings are read here; `build` knows its role
    if "config" not in inspect.signature(cls).parameters:
        return None
    config = typing.get_type_hints(cls.__init__)["config"]
    return typing.get_type_hints(config, include_extras=True)
