"""Translation of statements of reward programs, by kind of AST node."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from embodied.sandbox.values import (
    INSTEAD,
    LOOPS,
    Values,
    counted,
    counter,
    is_text,
    plain,
    refuse,
    written_number,
)

SIMPLE = (ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.Constant, ast.BinOp, ast.List)


class Translation(Values):
    """One module, line by line."""

    def statement(self, node: ast.stmt) -> ast.stmt:
        kinds: dict[type[ast.stmt], Callable[[Any], ast.stmt]] = {
            ast.FunctionDef: self._function,
            ast.Assign: self._assign,
            ast.AnnAssign: self._annotated,
            ast.AugAssign: self._augmented,
            ast.Return: self._return,
            ast.For: self._for,
        }
        kind = kinds.get(type(node))
        if kind is None:
            refuse(node, INSTEAD.get(type(node), f"{plain(node)} is not in the language"))
        if self.inside is None and not isinstance(node, ast.FunctionDef):
            self._constant_line(node)
        return ast.copy_location(kind(node), node)

    def _constant_line(self, node: ast.stmt) -> None:
        if not (isinstance(node, ast.Assign) and written_number(node.value) is not None):
            refuse(node, "outside of functions there can only be NAME = number")

    def _function(self, node: ast.FunctionDef) -> ast.stmt:
        if self.inside is not None:
            refuse(node, "functions cannot be inside functions")
        if node.decorator_list:
            refuse(node, "there are no decorators")
        args = node.args
        if args.defaults or args.kw_defaults or args.vararg or args.kwarg:
            refuse(node, "parameters have no defaults and no stars")
        if args.posonlyargs or args.kwonlyargs:
            refuse(node, "parameters are plain names")
        for arg in args.args:
            self._free(arg, arg.arg)
            _annotation(arg.annotation)
        _annotation(node.returns)
        self.inside = node.name
        body = [self.statement(line) for line in node.body if not _said(line)]
        self.inside = None
        if not body or not isinstance(node.body[-1], ast.Return):
            refuse(node, f"{node.name} does not end with return")
        plain = ast.arguments(
            posonlyargs=[], args=[ast.arg(arg=a.arg) for a in args.args], kwonlyargs=[],
            kw_defaults=[], defaults=[],
        )  # fmt: skip
        return ast.FunctionDef(name=node.name, args=plain, body=body, decorator_list=[])

    def _assign(self, node: ast.Assign) -> ast.stmt:
        if len(node.targets) > 1:
            refuse(node, "one name at a time can be assigned")
        return ast.Assign(targets=[self._target(node.targets[0])], value=self.value(node.value))

    def _annotated(self, node: ast.AnnAssign) -> ast.stmt:
        _annotation(node.annotation)
        if node.value is None:
            refuse(node, "a name needs a value")
        return ast.Assign(targets=[self._target(node.target)], value=self.value(node.value))

    def _augmented(self, node: ast.AugAssign) -> ast.stmt:
        if not isinstance(node.target, ast.Name):
            refuse(node, "nothing can be written in place; make a new tensor")
        again = ast.Name(node.target.id, ast.Load())
        sum_ = ast.copy_location(ast.BinOp(again, node.op, node.value), node)
        ast.fix_missing_locations(sum_)
        return ast.Assign(targets=[self._target(node.target)], value=self.value(sum_))

    def _return(self, node: ast.Return) -> ast.stmt:
        if node.value is None:
            refuse(node, "return needs a value")
        if isinstance(node.value, ast.Tuple):
            parts = [self.value(part) for part in node.value.elts]
            return ast.Return(ast.Tuple(parts, ast.Load()))
        return ast.Return(self.value(node.value))

    def _for(self, node: ast.For) -> ast.stmt:
        if node.orelse:
            refuse(node, "a loop has no else")
        if len(self.loops) == LOOPS:
            refuse(node, f"loops are at most {LOOPS} deep")
        name = self._counter(node.target)
        count = counted(node.iter)
        self.loops.append(name)
        body = [self.statement(line) for line in node.body if not _said(line)]
        self.loops.pop()
        return ast.For(ast.Name(counter(name), ast.Store()), count, body or [ast.Pass()], [])

    def _target(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Name):
            self._free(node, node.id)
            if node.id in self.loops:
                refuse(node, f"{node.id} counts a loop")
            return ast.Name(node.id, ast.Store())
        if isinstance(node, ast.Tuple):
            return ast.Tuple([self._target(part) for part in node.elts], ast.Store())
        if isinstance(node, ast.Subscript) and is_text(node.slice):
            return ast.Subscript(self._plain_name(node.value), node.slice, ast.Store())
        refuse(node, "nothing can be written in place; make a new tensor")


def _said(node: ast.stmt) -> bool:
    """Whether it is a docstring or another string statement."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _annotation(node: ast.expr | None) -> None:
    """Checks an annotation, which is dropped: only names of types are allowed."""
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.expr) and not isinstance(part, SIMPLE):
            refuse(part, "annotations are names of types")
