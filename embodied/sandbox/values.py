"""Translation of expressions of reward programs, by kind of AST node."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from embodied.core.build import nearest
from embodied.sandbox.table import (
    BUILTINS,
    CONSTANTS,
    EITHER,
    MODULES,
    TABLE,
    find,
)

LOOP = 64  # steps of one loop
LOOPS = 2  # of them in each other
LARGEST = 1e6  # number
EXPONENT = 8
PREFIX = "_f_"  # of our own names: a program's cannot begin with an underscore
OPERATORS = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.BitAnd, ast.BitOr,
    ast.BitXor,
)  # fmt: skip
COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
INSTEAD: dict[type[ast.AST], str] = {
    ast.If: "write torch.where(condition, yes, no) in place of if",
    ast.IfExp: "write torch.where(condition, yes, no) in place of if",
    ast.BoolOp: "write & and | between conditions in place of and, or",
    ast.Import: "nothing can be imported; torch's functions are there",
    ast.ImportFrom: "nothing can be imported; torch's functions are there",
    ast.JoinedStr: "there are no formatted strings",
    ast.While: "there are no while loops",
    ast.MatMult: "write (a * b).sum(dim=-1) in place of @",
}


@dataclass(frozen=True)
class Function:
    """A function of the program: its parameters, and the names it assigns."""

    parameters: tuple[str, ...]
    local: frozenset[str]


def refuse(node: ast.AST, reason: str) -> NoReturn:
    """SyntaxError at the node's line."""
    error = SyntaxError(reason)
    error.lineno = getattr(node, "lineno", None)
    raise error


def own(name: str) -> str:
    """The name of a function of the table in the compiled program."""
    return PREFIX + name.replace(".", "_")


def counter(name: str) -> str:
    """The name of a loop variable in a compiled program; outside of its loop it is undefined."""
    return f"{PREFIX}at_{name}"


class Values:
    """Translates the expressions of one module; `calls`: its call graph."""

    def __init__(self, functions: dict[str, Function], constants: set[str]) -> None:
        self.functions, self.constants = functions, constants
        self.calls: dict[str, set[str]] = {name: set() for name in functions}
        self.inside: str | None = None
        self.loops: list[str] = []

    def _free(self, node: ast.AST, name: str) -> None:
        if name.startswith("_"):
            refuse(node, f"names cannot begin with an underscore ({name})")
        if name in MODULES or name in BUILTINS or name in self.functions or name == "range":
            refuse(node, f"{name} has a meaning already")

    def _counter(self, target: ast.expr) -> str:
        if not isinstance(target, ast.Name):
            refuse(target, "a loop counts with one name")
        self._free(target, target.id)
        function = self.functions.get(self.inside or "")
        if target.id in self.loops or (function and target.id in function.parameters):
            refuse(target, f"{target.id} is in use")
        return target.id

    def value(self, node: ast.expr) -> ast.expr:
        kinds: dict[type[ast.expr], Callable[[Any], ast.expr]] = {
            ast.Constant: self._constant,
            ast.Name: self._name,
            ast.BinOp: self._binary,
            ast.UnaryOp: self._unary,
            ast.Compare: self._compare,
            ast.Call: self._call,
            ast.Attribute: self._attribute,
            ast.Subscript: self._subscript,
            ast.Dict: self._dict,
            ast.Tuple: self._misplaced,
            ast.List: self._misplaced,
        }
        kind = kinds.get(type(node))
        if kind is None:
            refuse(node, INSTEAD.get(type(node), f"{plain(node)} is not in the language"))
        return ast.copy_location(kind(node), node)

    def _misplaced(self, node: ast.expr) -> NoReturn:
        refuse(node, "lists are arguments of stack, cat and tensor only")

    def _constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, bool):
            refuse(node, "True and False are for keepdim only")
        if not isinstance(node.value, int | float):
            refuse(node, f"{node.value!r:.40} is not a number")
        if not math.isfinite(node.value) or abs(node.value) > LARGEST:
            refuse(node, f"numbers are at most {LARGEST:g}")
        return ast.Constant(float(node.value))

    def _name(self, node: ast.Name) -> ast.expr:
        name = node.id
        if name.startswith("_"):
            refuse(node, f"names cannot begin with an underscore ({name})")
        if name in self.loops:
            return _called("float", [ast.Name(counter(name), ast.Load())])
        return self._plain_name(node)

    def _plain_name(self, node: ast.expr) -> ast.Name:
        if not isinstance(node, ast.Name):
            refuse(node, f"{plain(node)} is no name")
        function = self.functions.get(self.inside or "", Function((), frozenset()))
        here = {*function.parameters, *function.local, *self.constants}
        if node.id not in here or node.id in self.loops:
            refuse(node, f"{node.id} is not known here{nearest(node.id, here)}")
        return ast.Name(node.id, ast.Load())

    def _binary(self, node: ast.BinOp) -> ast.expr:
        if not isinstance(node.op, OPERATORS):
            refuse(node, INSTEAD.get(type(node.op), f"{plain(node.op)} is not in the language"))
        if isinstance(node.op, ast.Pow):
            _exponent(node.right)
        return ast.BinOp(self.value(node.left), node.op, self.value(node.right))

    def _unary(self, node: ast.UnaryOp) -> ast.expr:
        if isinstance(node.op, ast.Not):
            refuse(node, "write ~ in place of not")
        return ast.UnaryOp(node.op, self.value(node.operand))

    def _compare(self, node: ast.Compare) -> ast.expr:
        if len(node.ops) > 1:
            refuse(node, "write (a < b) & (b < c) in place of a < b < c")
        if not isinstance(node.ops[0], COMPARISONS):
            refuse(node, f"{plain(node.ops[0])} is not in the language")
        return ast.Compare(self.value(node.left), node.ops, [self.value(node.comparators[0])])

    def _attribute(self, node: ast.Attribute) -> ast.expr:
        path = _path(node)
        if path and path[0] in MODULES and path[1] in CONSTANTS:
            return ast.Constant(CONSTANTS[path[1]])
        refuse(node, f".{node.attr:.40} cannot be read{_closest(node.attr)}")

    def _subscript(self, node: ast.Subscript) -> ast.expr:
        if is_text(node.slice):
            return ast.Subscript(self._plain_name(node.value), node.slice, ast.Load())
        return ast.Subscript(self.value(node.value), self._index(node.slice), ast.Load())

    def _index(self, node: ast.expr) -> ast.expr:
        """Translate an index: integers, slices of integers, `...`, `None`, or a mask."""
        if isinstance(node, ast.Tuple):
            return ast.Tuple([self._index(part) for part in node.elts], ast.Load())
        if isinstance(node, ast.Slice):
            ends = (node.lower, node.upper, node.step)
            return ast.Slice(*(None if end is None else self._whole(end) for end in ends))
        if isinstance(node, ast.Constant) and node.value in (None, ...):
            return ast.Constant(node.value)
        if isinstance(node, ast.Compare):
            return self.value(node)
        return self._whole(node)

    def _whole(self, node: ast.expr) -> ast.expr:
        """Translate an integer: a literal, a loop variable, or a loop variable +- 1."""
        if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) <= 4096:
            return ast.Constant(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return ast.UnaryOp(node.op, self._whole(node.operand))
        if isinstance(node, ast.Name) and node.id in self.loops:
            return ast.Name(counter(node.id), ast.Load())
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            return ast.BinOp(self._whole(node.left), node.op, self._whole(node.right))
        refuse(node, "only whole numbers that are written out can be an index or a dimension")

    def _dict(self, node: ast.Dict) -> ast.expr:
        for key in node.keys:
            if key is None or not is_text(key):
                refuse(node, "the keys of a dict are strings")
        return ast.Dict(list(node.keys), [self.value(value) for value in node.values])

    def _call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Name):
            return self._named_call(node, node.func.id)
        if not isinstance(node.func, ast.Attribute):
            refuse(node, "only functions by their names can be called")
        path = _path(node.func)
        if path and path[0] in MODULES:
            name = find(path[1])
            if name is None:
                refuse(node, f"there is no {path[0]}.{path[1]:.40}{_closest(path[1])}")
            return self._table_call(node, name, node.args)
        name = find(node.func.attr)
        if name is None or not TABLE[name].method or node.func.attr.startswith("_"):
            refuse(node, f"there is no method .{node.func.attr:.40}{_closest(node.func.attr)}")
        return self._table_call(node, name, [node.func.value, *node.args])

    def _named_call(self, node: ast.Call, name: str) -> ast.expr:
        if name in self.functions:
            self.calls[self.inside or name].add(name)
            words = [ast.keyword(_word(word), self.value(word.value)) for word in node.keywords]
            return ast.Call(
                ast.Name(name, ast.Load()), [self.value(arg) for arg in node.args], words
            )
        if name not in BUILTINS:
            refuse(node, f"there is no function {name:.40}{nearest(name, self.functions)}")
        return self._table_call(node, name, node.args)

    def _table_call(self, node: ast.Call, name: str, given: Sequence[ast.expr]) -> ast.expr:
        entry = TABLE[name]
        args = [
            self._dimension(arg) if at in entry.ints else self._argument(name, at, arg)
            for at, arg in enumerate(given)
        ]
        words: list[ast.keyword] = []
        for keyword in node.keywords:
            word = EITHER.get(_word(keyword), _word(keyword))
            if word not in entry.words:
                refuse(node, f"{name} takes no {word:.40}{nearest(word, entry.words)}")
            value = self._dimension if word == "dim" else self._argument_word
            words.append(ast.keyword(word, value(keyword.value)))
        return _called(name, args, words)

    def _argument_word(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Constant) and (node.value is None or type(node.value) is bool):
            return ast.Constant(node.value)
        return self.value(node)

    def _argument(self, name: str, at: int, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Starred):
            refuse(node, "there are no stars in calls")
        if name in ("stack", "cat", "tensor") and at == 0:
            return self._listed(name, node)
        return self._argument_word(node) if name in ("clamp", "norm") else self.value(node)

    def _listed(self, name: str, node: ast.expr) -> ast.expr:
        """Translate the list argument of stack, cat and tensor (for tensor: numbers only)."""
        if name == "tensor":
            return self._numbers(node)
        if isinstance(node, ast.ListComp):
            return self._comprehension(node)
        if not isinstance(node, ast.List | ast.Tuple):
            refuse(node, f"{name} takes a list that is written out: {name}([a, b], dim=-1)")
        return ast.List([self.value(part) for part in node.elts], ast.Load())

    def _numbers(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.List | ast.Tuple):
            return ast.List([self._numbers(part) for part in node.elts], ast.Load())
        return self.value(node)

    def _comprehension(self, node: ast.ListComp) -> ast.expr:
        if len(node.generators) > 1 or node.generators[0].ifs or node.generators[0].is_async:
            refuse(node, "a comprehension is [... for i in range(number)]")
        name = self._counter(node.generators[0].target)
        count = counted(node.generators[0].iter)
        if len(self.loops) == LOOPS:
            refuse(node, f"loops are at most {LOOPS} deep")
        self.loops.append(name)
        value = self.value(node.elt)
        self.loops.pop()
        generator = ast.comprehension(ast.Name(counter(name), ast.Store()), count, [], 0)
        return ast.ListComp(value, [generator])

    def _dimension(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Constant) and node.value is None:
            return ast.Constant(None)
        if isinstance(node, ast.Tuple | ast.List):
            return ast.Tuple([self._whole(part) for part in node.elts], ast.Load())
        return self._whole(node)


def _called(name: str, args: list[ast.expr], words: list[ast.keyword] | None = None) -> ast.expr:
    return ast.Call(ast.Name(own(name), ast.Load()), args, words or [])


def _word(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        refuse(keyword.value, "there are no stars in calls")
    return keyword.arg


def counted(node: ast.expr) -> ast.expr:
    """`range(n)` or `range(a, b)` with literal bounds, at most LOOP steps."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        ends = [a.value for a in node.args if isinstance(a, ast.Constant) and type(a.value) is int]
        right = 1 <= len(ends) == len(node.args) <= 2 and not node.keywords
        if right and max(ends) <= LOOP:
            args: list[ast.expr] = [ast.Constant(end) for end in ends]
            return ast.Call(ast.Name(PREFIX + "range", ast.Load()), args, [])
    refuse(node, f"loops are over range(number), at most {LOOP}")


def _exponent(node: ast.expr) -> None:
    number = written_number(node)
    if number is None or abs(number) > EXPONENT:
        refuse(node, f"an exponent is a number that is written out, at most {EXPONENT}")


def written_number(node: ast.expr) -> float | None:
    """The value of a literal number with its sign; None for any other expression."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = written_number(node.operand)
        return None if inner is None else (-inner if isinstance(node.op, ast.USub) else inner)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        whole = not isinstance(node.value, bool) and abs(node.value) <= LARGEST
        return float(node.value) if whole else None
    return None


def _path(node: ast.Attribute) -> tuple[str, str] | None:
    """("torch", "linalg.norm") of `torch.linalg.norm`; None if it does not start with a name."""
    words: list[str] = []
    here: ast.expr = node
    while isinstance(here, ast.Attribute):
        words.append(here.attr)
        here = here.value
    return (here.id, ".".join(reversed(words))) if isinstance(here, ast.Name) else None


def _closest(name: str) -> str:
    return nearest(name, TABLE) if len(name) <= 40 and not name.startswith("_") else ""


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) <= 64


def plain(node: ast.AST) -> str:
    return type(node).__name__
