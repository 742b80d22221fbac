"""Reads a reward program: Python source, its entry, and the variables that it needs.

Nothing here runs the program, and nothing here protects: the locked process does (`lock`). Reading
it first tells its author in one line what cannot work: a misspelt variable, a foreign import.
"""

from __future__ import annotations

import ast
import hashlib
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

from embodied.core.build import nearest

SOURCE = 16 * 1024  # bytes
BRACKETS = 32  # depth of
LONGEST = 1500  # characters of a reason
RUN = re.compile(r"(?:[-+~]\s*){24}|(?:\bnot\s+){8}")
ENTRIES = ("reward", "compute_reward", "compute_dense_reward")
IMPORTS = (
    *("__future__", "abc", "collections", "copy", "dataclasses", "enum", "functools", "itertools"),
    *("math", "numbers", "numpy", "operator", "torch", "typing", "warnings"),
)
"""Modules that the locked process has loaded; it cannot read the files of others."""


class Rejected(ValueError):
    """A program that must not be used. `layer`: the check that failed (source, syntax, language,
    signature, program, process, result)."""

    def __init__(self, layer: str, reason: str) -> None:
        self.layer = layer
        self.reason = " ".join(reason.split())[:LONGEST]
        super().__init__(f"{layer}: {self.reason}")


@dataclass(frozen=True)
class Program:
    """A program's entry: a function, or a method of the class `owner`.

    `parameters`: variables passed by name; `attributes`: variables read from `self`; `bare`: a
    function whose first parameter is `self`; `arrays`: it uses numpy and not torch.
    """

    source: str
    entry: str
    owner: str
    parameters: tuple[str, ...]
    attributes: tuple[str, ...]
    bare: bool
    arrays: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        """The variables that it needs, each once."""
        return tuple(dict.fromkeys([*self.parameters, *self.attributes]))

    @property
    def digest(self) -> str:
        """sha256 of the source."""
        return hashlib.sha256(self.source.encode()).hexdigest()


def read(source: str, known: Iterable[str]) -> Program:
    """The first of ENTRIES that `source` defines, as a function or else as a method; it may ask
    for `known` variables. Rejected with the layer, the line and the nearest name."""
    _require_plain_text(source)
    tree, known = _parsed(source), list(known)
    _require_imports(tree)
    found = defined(tree)
    entry = next((name for name in ENTRIES if name in found), None)
    if entry is None:
        why = f"there is no function {ENTRIES[0]}{nearest(ENTRIES[0], found)}"
        raise Rejected("signature", why)
    owner, function = found[entry]
    static = any(
        isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list
    )
    arguments = [*function.args.posonlyargs, *function.args.args]
    takes_self = bool(arguments) and not static and (owner != "" or arguments[0].arg == "self")
    parameters = _parameters(function, known, skip=int(takes_self))
    attributes = _attributes(tree, known) if takes_self else ()
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    arrays = bool(words & {"np", "numpy"}) and "torch" not in words
    bare = takes_self and not owner
    return Program(source, function.name, owner, parameters, attributes, bare, arrays)


def defined(tree: ast.Module) -> dict[str, tuple[str, ast.FunctionDef]]:
    """Functions and methods by name, with their class ("": none); functions before methods."""
    found: dict[str, tuple[str, ast.FunctionDef]] = {}
    for node in tree.body:
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, ast.FunctionDef) and isinstance(node, ast.ClassDef):
                found[part.name] = (node.name, part)
    return found | {n.name: ("", n) for n in tree.body if isinstance(n, ast.FunctionDef)}


def required(function: ast.FunctionDef) -> list[str]:
    """The parameters of a function that have no default."""
    plain = [*function.args.posonlyargs, *function.args.args]
    return [a.arg for a in plain[: len(plain) - len(function.args.defaults)]]


def _parameters(function: ast.FunctionDef, known: list[str], skip: int) -> tuple[str, ...]:
    """Names of the known parameters; an unknown one is left out if it has a default."""
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    optional = {a.arg for a in plain[len(plain) - len(arguments.defaults) :]}
    optional |= {
        a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d
    }
    names = [a.arg for a in [*plain[skip:], *arguments.kwonlyargs]]
    for name in names:
        if name not in known and name not in optional:
            raise Rejected("signature", f"{function.name} asks for {name}{nearest(name, known)}")
    return tuple(name for name in names if name in known)


def _attributes(tree: ast.Module, known: list[str]) -> tuple[str, ...]:
    """Variables that are read as `self.NAME`. What the program sets itself is not one of them."""
    own = {name for node in ast.walk(tree) for name in _own_names(node)}
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if not _of_self(node) or node.attr in own or node.attr.startswith("__"):
            continue
        if node.attr not in known:
            problem = f"line {node.lineno}: there is no self.{node.attr}{nearest(node.attr, known)}"
            raise Rejected("signature", problem)
        found[node.attr] = None
    return tuple(found)


def _own_names(node: ast.AST) -> Iterator[str]:
    """Attributes that a program defines: assigned ones, and members of its classes."""
    if _of_self(node) and isinstance(node.ctx, ast.Store):
        yield node.attr
    if isinstance(node, ast.ClassDef):
        for part in node.body:
            if isinstance(part, ast.FunctionDef | ast.ClassDef):
                yield part.name
            for name in ast.walk(part) if isinstance(part, ast.Assign | ast.AnnAssign) else ():
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    yield name.id


def _of_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Whether it is `self.NAME`."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _require_plain_text(source: str) -> None:
    size = len(source.encode(errors="replace"))
    if size > SOURCE:
        raise Rejected("source", f"{size} bytes; at most {SOURCE} are read")
    for number, line in enumerate(source.splitlines(), 1):
        if any(not c.isprintable() and c not in "\r\t" for c in line):
            raise Rejected("source", f"line {number}: there are control characters in it")
    depth = 0
    for char in source:
        depth += (char in "([{") - (char in ")]}")
        if depth > BRACKETS:
            raise Rejected("source", f"brackets are nested more than {BRACKETS} deep")
    if RUN.search(source):
        raise Rejected("source", "a long run of signs")


def _parsed(source: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        raise Rejected("syntax", f"{where}{error.msg}") from error
    except (RecursionError, MemoryError, ValueError) as error:
        raise Rejected("syntax", f"it cannot be parsed ({type(error).__name__})") from error


def _require_imports(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "."] if not node.level else ["."]
        for name in names:
            if name.partition(".")[0] not in IMPORTS:
                allowed = ", ".join(m for m in IMPORTS if m != "__future__")
                line = getattr(node, "lineno", 0)
                raise Rejected(
                    "language", f"line {line}: {name:.40} cannot be imported; there are {allowed}"
                )
