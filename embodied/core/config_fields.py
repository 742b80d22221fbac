"""The settings of a class, read from its source without importing it: names, types, defaults.

A class that takes `config: Config` has the fields of that dataclass as settings. What a setting is
stands in the comment on the line of its field.
"""

from __future__ import annotations

import ast
import importlib.util
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from embodied.core import bounds

Found = tuple["Source", ast.ClassDef]
KNOWN: dict[str, Any] = {
    **{name: getattr(bounds, name) for name in dir(bounds) if name[0].isupper()},
    **{kind.__name__: kind for kind in (int, float, str, bool, tuple, list, dict)},
    **{"Annotated": Annotated, "Any": Any, "Literal": Literal, "Union": Union},
    **{"Mapping": Mapping, "Sequence": Sequence},
}
"""What a name of these means in the type of a field."""


@dataclass(frozen=True)
class Setting:
    """One field of a dataclass.

    `kind` is its type; what the source does not tell is `Any`. `default` is as written in the
    source, and None where a value must be given. `says` is the comment on the field's line.
    """

    name: str
    kind: Any
    default: str | None
    says: str = ""


class Source:
    """The parsed text of a module."""

    def __init__(self, module: str, text: str) -> None:
        self.module, self.lines, self.tree = module, text.splitlines(), ast.parse(text)
        self.classes = {n.name: n for n in self.tree.body if isinstance(n, ast.ClassDef)}
        self.imported = dict(self._imported())
        self.assigned = dict(self._assigned())

    def _imported(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """Names of `from module import name`, with their module and name there."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    yield alias.asname or alias.name, (node.module, alias.name)

    def _assigned(self) -> Iterator[tuple[str, ast.expr]]:
        """Names that the module itself gives a value."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                yield node.targets[0].id, node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                yield ast.unparse(node.target), node.value

    def kind(self, written: ast.expr) -> Any:
        """The type that an annotation of this module says; `Any` where the source does not tell."""
        try:
            code = compile(ast.Expression(written), self.module, "eval")
            return eval(code, {"__builtins__": {}}, _Names(self))
        except (TypeError, AttributeError, NameError):  # a type of another library
            return Any

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
    """The meaning of names in the annotations of a module."""

    def __init__(self, source: Source) -> None:
        super().__init__(KNOWN)
        self.source = source

    def __missing__(self, name: str) -> Any:
        if name in self.source.assigned:
            return self.source.kind(self.source.assigned[name])
        if name in self.source.imported:
            module, there = self.source.imported[name]
            source = source_of(module)
            return Any if source is None else _Names(source)[there]
        return Any


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


def settings_of(target: str) -> list[Setting] | None:
    """The settings of the class `target` ("embodied.policies.gaussian.Gaussian"), those of bases
    first; None if the source does not show them."""
    found = config_of(target)
    if found is None:
        return None
    named = dict[str, Setting]()
    try:
        for setting in _fields(*found):
            named[setting.name] = setting
    except LookupError:  # a base class whose source is not found
        return None
    return list(named.values())


def config_of(target: str) -> Found | None:
    """The dataclass that the class `target` takes as `config`."""
    module, _, name = target.rpartition(".")
    source = source_of(module) if module else None
    found = None if source is None else source.find(name)
    return None if found is None else _config(*found)


def _config(source: Source, kind: ast.ClassDef) -> Found | None:
    if any("dataclass" in ast.unparse(each) for each in kind.decorator_list):
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


def _fields(source: Source, kind: ast.ClassDef) -> Iterator[Setting]:
    for base in reversed(kind.bases):
        name = ast.unparse(base)
        if (found := source.find(name)) is None:
            raise LookupError(name)
        yield from _fields(*found)
    for node in kind.body:
        if not isinstance(node, ast.AnnAssign):
            continue
        if not ast.unparse(node.annotation).startswith("ClassVar"):
            name, hint = ast.unparse(node.target), source.kind(node.annotation)
            yield Setting(name, hint, _default(node.value), _comment(source, node))


def _default(value: ast.expr | None) -> str | None:
    """`field(default_factory=dict)` as {}, everything else as it is written."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        given = {word.arg: word.value for word in value.keywords}
        if "default" in given:
            return ast.unparse(given["default"])
        factory = ast.unparse(given["default_factory"]) if "default_factory" in given else None
        empty = {"dict": "{}", "list": "[]", "tuple": "[]"}
        return None if factory is None else empty.get(factory.partition("[")[0], f"{factory}()")
    return None if value is None else ast.unparse(value)


def _comment(source: Source, node: ast.AnnAssign) -> str:
    line = source.lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :]
    return line.partition("#")[2].strip()


def in_words(kind: Any) -> str:
    """A type for people: "int, at least 1; or null"; "" for one that the source does not tell."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        limits = [each.text for each in args[1:] if each.text != bounds.Bound().text]
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
