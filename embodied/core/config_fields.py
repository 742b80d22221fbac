"""The settings of a class, read from its source without importing it: names, defaults, sentences.

A class that takes `config: Config` has the fields of that dataclass as settings. What a field is
comes from the comment behind it, the string below it, or the sentence of the dataclass's docstring
that begins with it; else, for a common name, from common_settings.yaml; else from any sentence.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Found = tuple["Source", ast.ClassDef]


@dataclass(frozen=True)
class Setting:
    """`kind` and `default` as written in the source; `default` is None where one must be given."""

    name: str
    kind: str
    default: str | None
    says: str = ""


class Source:
    """The parsed text of a module."""

    def __init__(self, module: str, text: str) -> None:
        self.module, self.lines, self.tree = module, text.splitlines(), ast.parse(text)
        self.classes = {n.name: n for n in self.tree.body if isinstance(n, ast.ClassDef)}
        self.imported = dict(self._imported())

    def _imported(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """Names of `from module import name`, with their module and name there."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    yield alias.asname or alias.name, (node.module, alias.name)

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


@cache
def common() -> dict[str, str]:
    """Sentences for settings of a common name."""
    import yaml

    return yaml.safe_load(Path(__file__).with_name("common_settings.yaml").read_text())


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
    text = ast.get_docstring(kind) or ""
    for node, after in zip(kind.body, [*kind.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        hint = ast.unparse(node.annotation)
        if not hint.startswith("ClassVar"):
            name = node.target.id
            begins, has = _sentences(text, name)
            own = _comment(source, node) or _below(after) or begins
            says = own or common().get(name) or has
            yield Setting(name, hint, _default(node.value), says)


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


def _below(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def _sentences(text: str, name: str) -> tuple[str, str]:
    """The sentence of `text`, or part of it between semicolons, that begins with `name`, and the
    first that has it anywhere."""
    parts = re.split(r"(?<=[.;])\s+", " ".join(text.split()))
    about = [part for part in parts if f"`{name}`" in part]
    begins = [part for part in about if part.startswith(f"`{name}`")]
    return (begins or [""])[0].rstrip(".;"), (about or [""])[0].rstrip(".;")
