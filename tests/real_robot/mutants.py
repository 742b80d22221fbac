"""Mutants of a Python source: one operator, constant or function is another one, or one statement
is left out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

OPERATORS = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+"},
    **{"*": "/", "/": "*", "and": "or", "or": "and", "is": "is not", "is not": "is"},
    **{"in": "not in", "not in": "in", "|": "&", "&": "|"},
}
FUNCTIONS = {
    **{"min": "max", "max": "min", "any": "all", "all": "any"},
    **{"minimum": "maximum", "maximum": "minimum"},
}
NOT_TRIED = ("annotation", "returns", "decorator_list")
SCOPES = ast.FunctionDef | ast.ClassDef | ast.Lambda


@dataclass(frozen=True)
class Where:
    """Where a node stands."""

    line: int = 0
    """First line of its statement."""
    scope: tuple[int, int] = (0, 0)
    """First and last line of the function or class that it is a part of; zeros: of none."""
    function: str = ""
    """Function in whose body it stands, with its class; empty: a class's or module's statement."""
    owner: str = ""
    """Name of its class, and a point; empty: of none."""
    constant: str = ""
    """Name of the module's constant that it is the value of; empty: of none."""


@dataclass(frozen=True)
class Mutant:
    """Bytes `start` to `end` of a source become `new`."""

    line: int
    start: int
    end: int
    old: str
    new: str
    where: Where

    def __str__(self) -> str:
        return f"{self.line}: {self.change}"

    @property
    def change(self) -> str:
        """What becomes what, in one line."""
        return f"{' '.join(self.old.split())} -> {self.new}"

    @property
    def key(self) -> str:
        """Tells it from the other mutants of its source."""
        return f"{self.start} {self.end} {self.new}"

    def applied(self, source: bytes) -> bytes:
        """The other source."""
        return source[: self.start] + self.new.encode() + source[self.end :]

    def lines(self, source: bytes) -> set[int]:
        """Lines of which a test has to run one before it can see the mutant; empty: any."""
        if self.where.function:
            return set(range(self.where.line, self.line + 1))
        if self.where.constant:
            return {
                node.lineno
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
                if node.id == self.where.constant
            }
        first, last = self.where.scope
        return set(range(first, last + 1)) if last else set()


class Places:
    """Bytes of a source at which its nodes begin and end."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.starts = [0]
        for each in source.split(b"\n"):
            self.starts.append(self.starts[-1] + len(each) + 1)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """First byte of a node, and the byte after its last."""
        end = self.starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
        return self.starts[node.lineno - 1] + node.col_offset, end

    def changed(self, node: ast.expr | ast.stmt, new: str, where: Where) -> Mutant:
        """The node becomes `new`."""
        start, end = self.span(node)
        old = self.source[start:end].decode()
        return Mutant(node.lineno, start, end, old, new, where)

    def between(self, left: ast.expr, right: ast.expr, where: Where) -> Iterator[Mutant]:
        """The operator between two expressions is another one."""
        begin, end = self.span(left)[1], self.span(right)[0]
        text = self.source[begin:end].decode()
        old = " ".join(text.strip(" ()\\\n").split())
        if old in OPERATORS and text.count(old) == 1:
            at = begin + text.encode().index(old.encode())
            line = left.end_lineno or left.lineno
            yield Mutant(line, at, at + len(old), old, OPERATORS[old], where)


def mutants(source: bytes) -> list[Mutant]:
    """All mutants of a source, in its order."""
    places = Places(source)
    found = [
        mutant
        for node, where in visited(ast.parse(source), Where())
        for mutant in of_node(node, where, places)
    ]
    return sorted(found, key=lambda each: (each.start, each.end, each.new))


def of_node(node: ast.AST, where: Where, places: Places) -> Iterator[Mutant]:
    """The mutants of a node alone."""
    if isinstance(node, ast.Compare):
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            yield from places.between(left, right, where)
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from places.between(left, right, where)
    elif isinstance(node, ast.BinOp):
        yield from places.between(node.left, node.right, where)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        start, end = places.span(node)[0], places.span(node.operand)[0]
        old = "not" if isinstance(node.op, ast.Not) else "-"
        yield Mutant(node.lineno, start, end, old, "", where)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield places.changed(node, _other(node.value), where)
    elif isinstance(node, ast.Name) and node.id in FUNCTIONS:
        yield places.changed(node, FUNCTIONS[node.id], where)
    elif isinstance(node, ast.Attribute) and node.attr in FUNCTIONS:
        end = places.span(node)[1]
        line = node.end_lineno or node.lineno
        yield Mutant(line, end - len(node.attr), end, node.attr, FUNCTIONS[node.attr], where)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield places.changed(node, "pass", where)
    elif isinstance(node, ast.Assign | ast.AugAssign) and _runs_again(where):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Attribute | ast.Subscript):
            yield places.changed(node, "pass", where)


def _runs_again(where: Where) -> bool:
    """Whether it is no first assignment, without which nothing runs."""
    return bool(where.function) and not where.function.endswith("__init__")


def _other(value: bool | int | float) -> str:
    """Another constant: clearly another one, since a little more is often as right."""
    if isinstance(value, bool):
        return str(not value)
    if value in (0, 1):
        return repr(type(value)(1 - value))
    return repr(value * 100)


def visited(tree: ast.AST, where: Where) -> Iterator[tuple[ast.AST, Where]]:
    """All nodes but annotations, whose bounds are settings', decorators, and texts with values in
    them."""
    for name, value in ast.iter_fields(tree):
        if name in NOT_TRIED or isinstance(tree, ast.JoinedStr) or _typed(tree):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST):
                continue
            here = _where(tree, name, node, where)
            yield node, here
            yield from visited(node, here)


def _typed(node: ast.AST) -> bool:
    """Whether it is a type with bounds."""
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == "Annotated"
    )


def _where(tree: ast.AST, field: str, node: ast.AST, where: Where) -> Where:
    """Where `node` stands, a part of `tree`, which stands `where`."""
    if isinstance(tree, SCOPES):
        where = replace(where, scope=(tree.lineno, tree.end_lineno or tree.lineno))
    if isinstance(tree, ast.ClassDef):
        where = replace(where, owner=f"{tree.name}.")
    if isinstance(tree, ast.FunctionDef) and field == "body":
        where = replace(where, function=where.owner + tree.name)
    if isinstance(node, ast.stmt):
        where = replace(where, line=node.lineno)
        if isinstance(tree, ast.Module) and isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            where = replace(where, constant=target.id if isinstance(target, ast.Name) else "")
    return where
