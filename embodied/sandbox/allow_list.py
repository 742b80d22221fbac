"""Allow-list of the reward language: a small, straight-line subset of Python over tensors.

A program is parsed, checked against the allow-list and translated before it is compiled: calls,
also of methods, become calls of functions in our table, integers become floats, and `x += y`
becomes `x = x + y`. The translation has no attribute access, no foreign names and no data-dependent
control flow, so that its cost depends on the number of transitions alone. Attribute names are
allow-listed because removing builtins is no protection: `__subclasses__` gives access to them.
"""

from __future__ import annotations

import ast
import hashlib
import re
import unicodedata
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from embodied.core.build import nearest
from embodied.sandbox.table import BUILTINS, MODULES
from embodied.sandbox.translate import Translation
from embodied.sandbox.values import Function

SOURCE = 16 * 1024  # bytes
BRACKETS = 32  # depth of
DEPTH = 40  # of the syntax tree
NODES = 600  # of a function
FUNCTIONS = 8
LONGEST = 1500  # characters of a reason
RUN = re.compile(r"(?:[-+~]\s*){24}|(?:\bnot\s+){8}")
ENTRY = "reward"
RESERVED = MODULES | BUILTINS | {"range"}


class Rejected(ValueError):
    """A program that must not be used. `layer`: the check that failed (source, syntax, language,
    signature, process, result)."""

    def __init__(self, layer: str, reason: str) -> None:
        self.layer, self.reason = layer, " ".join(reason.split())[:LONGEST]
        super().__init__(f"{layer}: {self.reason}")


@dataclass(frozen=True)
class Checked:
    """A program that passed the allow-list; `inputs`: the parameters of its entry, in order."""

    source: str
    tree: ast.Module
    inputs: tuple[str, ...]

    @property
    def digest(self) -> str:
        """sha256 of the source."""
        return hashlib.sha256(self.source.encode()).hexdigest()


def check(source: str, known: Iterable[str] | None = None, entry: str = ENTRY) -> Checked:
    """`source` as a program with a function `entry`, whose parameters must be among `known`.

    Raises Rejected with the layer, the line, and what to write instead.
    """
    _text(source)
    tree = _parsed(source)
    functions = _functions(tree)
    constants = {
        name for node in tree.body if isinstance(node, ast.Assign) for name in _named(node)
    }
    try:
        translation = Translation(functions, constants)
        body = [translation.statement(node) for node in tree.body if not _docstring(node)]
        _no_recursion(translation.calls)
    except SyntaxError as error:
        raise Rejected("language", _at(error)) from error
    if entry not in functions:
        raise Rejected("signature", f"there is no function {entry}{nearest(entry, functions)}")
    inputs = functions[entry].parameters
    if known is not None:
        for name in inputs:
            if name not in (available := set(known)):
                raise Rejected("signature", f"{entry} asks for {name}{nearest(name, available)}")
    module = ast.Module(body=body, type_ignores=[])
    return Checked(source, ast.fix_missing_locations(module), inputs)


def _text(source: str) -> None:
    size = len(source.encode(errors="replace"))
    if size > SOURCE:
        raise Rejected("source", f"{size} bytes; at most {SOURCE} are read")
    for number, line in enumerate(source.splitlines(), 1):
        if not line.isascii() or unicodedata.normalize("NFKC", line) != line:
            raise Rejected("source", f"line {number}: only ASCII may be used")
    if any(not c.isprintable() and c not in "\n\r\t" for c in source):
        raise Rejected("source", "there are control characters in it")
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
            tree = ast.parse(source)
    except SyntaxError as error:
        raise Rejected("syntax", _at(error)) from error
    except (RecursionError, MemoryError, ValueError) as error:
        raise Rejected("syntax", f"it cannot be parsed ({type(error).__name__})") from error
    layer: list[ast.AST] = [tree]
    for _ in range(DEPTH):
        layer = [child for node in layer for child in ast.iter_child_nodes(node)]
        if not layer:
            return tree
    raise Rejected("language", f"expressions are nested more than {DEPTH} deep")


def _functions(tree: ast.Module) -> dict[str, Function]:
    """The functions of a module, with their parameters and local names."""
    found: dict[str, Function] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            if node.name in found or node.name in RESERVED or node.name.startswith("_"):
                raise Rejected("language", f"line {node.lineno}: no function can be {node.name}")
            nodes = sum(isinstance(n, ast.expr | ast.stmt) for n in ast.walk(node))
            if nodes > NODES:
                raise Rejected("language", f"{node.name} has {nodes} parts; at most {NODES}")
            names = tuple(arg.arg for arg in node.args.args)
            found[node.name] = Function(names, frozenset(_stored(node)))
    if len(found) > FUNCTIONS:
        raise Rejected("language", f"{len(found)} functions; at most {FUNCTIONS}")
    return found


def _stored(node: ast.FunctionDef) -> Iterable[str]:
    """Names that are assigned in a function, including loop variables."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id


def _named(node: ast.Assign) -> Iterable[str]:
    return (target.id for target in node.targets if isinstance(target, ast.Name))


def _docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _no_recursion(calls: dict[str, set[str]]) -> None:
    """SyntaxError if a function calls itself, directly or not."""

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise SyntaxError(f"{name} calls itself; recursion is not allowed")
        for called in calls.get(name, ()):
            visit(called, (*above, name))

    for name in calls:
        visit(name, ())


def _at(error: SyntaxError) -> str:
    where = f"line {error.lineno}: " if error.lineno else ""
    return f"{where}{error.msg}"
