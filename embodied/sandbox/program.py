"""Reads a reward program: Python source, its entry, and the variables that it needs.

Nothing here protects: the locked process does (`worker`). Reading a program first tells its author
in one line what cannot work: a misspelt variable, a foreign import.

`LoadedProgram` runs a program inside the locked process, and what it returns is validated. It is
called with batches [N, ...] first. If that fails, it is called with one transition at a time, which
is what programs with `if` on a number, or without `dim=`, are written for.

A program that asks for `memory` [N, WIDTH] returns `total, components, memory`. Nothing stays in
the process: who runs an environment passes each env's memory on to its next step.
"""

from __future__ import annotations
import __future__

import ast
import hashlib
import math
import re
import sys
import types
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from embodied.core.build import nearest
from embodied.core.tensors import Tensors
from embodied.sandbox.quaternions import HELPERS, MODULES

SOURCE = 16 * 1024  # bytes
BRACKETS = 32  # depth of
LONGEST = 1500  # characters of a reason
RUN = re.compile(r"(?:[-+~]\s*){24}|(?:\bnot\s+){8}")
MEMORY, WIDTH = "memory", 8  # variable, and its numbers per transition
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

    `parameters`: variables passed by name; `attributes`: variables read from `self`, by the dotted
    path under which they are read (`robot.tool`); `bare`: a function whose first parameter is
    `self`; `arrays`: it uses numpy and not torch.
    """

    source: str
    entry: str
    owner: str
    parameters: tuple[str, ...]
    attributes: Mapping[str, str]
    bare: bool
    arrays: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        """The variables that it needs, each once."""
        return tuple(dict.fromkeys([*self.parameters, *self.attributes.values()]))

    @property
    def stateful(self) -> bool:
        """Whether it asks for the memory."""
        return MEMORY in self.inputs

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
    _require_no_addresses(tree)
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
    attributes = _attributes(tree, known) if takes_self else {}
    _require_no_memory(tree)
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


def _attributes(tree: ast.Module, known: list[str]) -> dict[str, str]:
    """Variables that are read as `self.NAME` or `self.PART.NAME`, by their paths. What the program
    sets itself is not one of them."""
    own = {name for node in ast.walk(tree) for name in _own_names(node)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        path = _path_of_self(node)
        if not path or path[0] in own or path[0].startswith("__"):
            continue
        place = _resolved(path, known)
        if place is None:
            shown = ".".join(("self", *path[:2]))
            problem = f"line {node.lineno}: there is no {shown}{nearest(path[-1], known)}"
            raise Rejected("signature", problem)
        parts, name = place
        found[".".join(path[:parts])] = name
    return found


AFTER = ("after", "next")
STATES = ("before", *AFTER)


def _resolved(path: Sequence[str], known: list[str]) -> tuple[int, str] | None:
    """How many parts of a path name a variable, and which one: `tool`, `robot.tool` (also
    `robot_tool`), `after.tool` (also `next_tool`)."""
    if path[0] in known:
        return 1, path[0]
    for parts in range(len(path), 1, -1):
        names = [part for part in path[:parts] if part not in STATES]
        later = "next_" if any(part in AFTER for part in path[:parts]) else ""
        for start in range(len(names)):
            name = later + "_".join(names[start:])
            if name in known:
                return parts, name
    return None


def _path_of_self(node: ast.AST) -> tuple[str, ...]:
    """The names of `self.NAME.NAME...`; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return tuple(reversed(names)) if isinstance(node, ast.Name) and node.id == "self" else ()


def _require_no_memory(tree: ast.Module) -> None:
    """Rejected where a method reads an attribute, or asks whether it is there, before it sets it:
    each call has a new `self`, so that it would always find the initial value."""
    for method in ast.walk(tree):
        if not isinstance(method, ast.FunctionDef) or method.name == "__init__":
            continue
        first: dict[tuple[str, bool], int] = {}  # the line of (attribute, whether it is set)
        for node in ast.walk(method):
            for name, sets in _uses(node):
                line = getattr(node, "lineno", 0)
                first[name, sets] = min(line, first.get((name, sets), line))
        for (name, sets), line in first.items():
            if sets and first.get((name, False), line + 1) <= line:
                raise Rejected(
                    "language",
                    f"line {line}: self.{name} is read and then set; nothing is kept between "
                    f"calls but {MEMORY}, a third value of the last step",
                )


def _uses(node: ast.AST) -> list[tuple[str, bool]]:
    """The attributes of `self` that a node reads (false) or sets (true)."""
    if _of_self(node):
        return [(node.attr, isinstance(node.ctx, ast.Store))]
    if isinstance(node, ast.AugAssign) and _of_self(node.target):
        return [(node.target.attr, False)]
    match node:
        case ast.Call(
            func=ast.Name(id="hasattr" | "getattr"),
            args=[ast.Name(id="self"), ast.Constant(value=str(name)), *_],
        ):
            return [(name, False)]
        case _:
            return []


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
    """Rejected for a foreign import that the program uses, unless it is prepared for its failure
    (`try`)."""
    tried = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for statement in node.body
        for part in ast.walk(statement)
    }
    used = _used_names(tree)
    for node in ast.walk(tree):
        for name in foreign(node):
            if id(node) in tried or not _bound(node) & used:
                continue
            allowed = ", ".join(m for m in IMPORTS if m != "__future__")
            line = getattr(node, "lineno", 0)
            raise Rejected(
                "language", f"line {line}: {name:.40} cannot be imported; there are {allowed}"
            )


def _require_no_addresses(tree: ast.Module) -> None:
    """Rejected where it calls `id` or `hash`: they are not the same in another process, and the
    gate, which asks one process twice, sees that only by chance."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="id" | "hash" as name)):
                raise Rejected(
                    "language",
                    f"line {node.lineno}: {name}() differs from process to process; compute the "
                    "reward from the variables alone",
                )
            case _:
                pass


def foreign(node: ast.AST) -> list[str]:
    """The modules that a statement imports and that are not there."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom):
        names = [node.module or "."] if not node.level else ["."]
    return [n for n in names if n.partition(".")[0] not in IMPORTS and n not in MODULES]


def _bound(node: ast.AST) -> set[str]:
    """The names that an import defines; `from module import *`: any."""
    aliases = node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
    return {(alias.asname or alias.name).partition(".")[0] for alias in aliases}


def _used_names(tree: ast.Module) -> set[str]:
    return {"*"} | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


class _WithoutForeign(ast.NodeTransformer):
    """Unused foreign imports are left out; others fail when they are reached."""

    def __init__(self, used: set[str]) -> None:
        self.used = used

    def visit_Import(self, node: ast.Import) -> ast.stmt:
        return self._import(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        return self._import(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> ast.stmt:
        names = foreign(node)
        if not names:
            return node
        if not _bound(node) & self.used:
            return ast.copy_location(ast.Pass(), node)
        text = f"raise ImportError({names[0] + ' is not there'!r})"
        failing = ast.copy_location(ast.parse(text).body[0], node)
        return ast.fix_missing_locations(failing)


COMPONENTS = 32
MESSAGE = 1500  # most characters of an error
PATHS = re.compile(r"(?:/[\w.+-]+){2,}")
FILE = "<program>"
TYPES = ["Any", "Callable", "Dict", "List", "Mapping", "Optional", "Sequence", "Tuple", "Union"]
Columns = tuple[np.ndarray, dict[str, np.ndarray], list[np.ndarray]]
"""Total, components, and the memory in a list, which is empty for a program without one."""


@dataclass(frozen=True)
class ProgramOutput:
    """Output of a program: `total` [N] and `components` [N] each, and the `memory` [N, WIDTH] for
    the next step ([N, 0] without one), float32."""

    total: Tensor
    components: Tensors
    memory: Tensor


class LoadedProgram:
    """A program's entry as a function of arrays, in the locked process only. `one_by_one`: it is
    called once per transition (None: not known before the first call)."""

    def __init__(self, program: Program, one_by_one: bool | None = None) -> None:
        self.program = program
        self.one_by_one = one_by_one
        self.names: dict[str, Any] = {
            **{name: getattr(typing, name) for name in TYPES},
            **{"torch": torch, "Tensor": torch.Tensor, "math": math, "np": np, "numpy": np},
            **HELPERS,
            "__name__": "program",
        }
        sys.modules["program"] = types.ModuleType("program")  # dataclasses look for it
        for name in MODULES:
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(HELPERS)
        # Annotations are not evaluated: they may name types of other simulators.
        flags = __future__.annotations.compiler_flag
        tree = _parsed(program.source)
        tree = _WithoutForeign(_used_names(tree)).visit(tree)
        with explained():
            exec(compile(tree, FILE, "exec", flags), self.names)

    def __call__(self, arrays: Sequence[np.ndarray], rows: int) -> Columns:
        """The total [rows], the components [rows] and the memory [rows, WIDTH]; Rejected."""
        values = [a if self.program.arrays else torch.from_numpy(a) for a in arrays]
        if self.one_by_one is None:
            return self._first(values, rows)
        return self._alone(values, rows) if self.one_by_one else self._batch(values, rows)

    def _first(self, values: Sequence[Any], rows: int) -> Columns:
        try:
            output = self._batch(values, rows)
            self.one_by_one = False
        except Rejected as error:
            try:
                output = self._alone(values, rows)
                self.one_by_one = True
            except Rejected:
                raise error from None
        return output

    def _batch(self, values: Sequence[Any], rows: int) -> Columns:
        total, parts, kept = split(self._call(values), self.program.stateful)
        named = {name: column(f"component {name}", v, rows, spread=True) for name, v in parts}
        memory = [array("the memory", value, (rows, WIDTH)) for value in kept]
        return column("the reward", total, rows), named, memory

    def _alone(self, values: Sequence[Any], rows: int) -> Columns:
        total, named = np.zeros(rows, np.float32), dict[str, np.ndarray]()
        memory = np.zeros((rows, WIDTH), np.float32)
        stateful = self.program.stateful
        for row in range(rows):
            reward, parts, kept = split(self._call([value[row] for value in values]), stateful)
            total[row] = scalar("the reward", reward)
            for value in kept:
                memory[row] = array("the memory", value, (WIDTH,))
            for name, value in parts:
                made = named.setdefault(name, np.zeros(rows, np.float32))
                made[row] = scalar(f"component {name}", value)
        return total, named, [memory] if stateful else []

    def _call(self, values: Sequence[Any]) -> Any:
        program, found = self.program, dict(zip(self.program.inputs, values, strict=True))
        given = {name: found[name] for name in program.parameters}
        with explained(), torch.no_grad():
            if not program.owner and not program.bare:
                return self.names[program.entry](**given)
            owner: Any = types.SimpleNamespace if program.bare else self.names[program.owner]
            made = owner.__new__(owner)  # a new `self` in each call: no batch sees another's
            for path, name in program.attributes.items():
                _set(made, path, found[name])
            if program.bare:
                return self.names[program.entry](made, **given)
            made.__init__()
            return getattr(made, program.entry)(**given)


def _set(owner: Any, path: str, value: Any) -> None:
    """Set the attribute at a dotted path; objects on its way are made."""
    *way, last = path.split(".")
    for part in way:
        if not hasattr(owner, part):
            setattr(owner, part, types.SimpleNamespace())
        owner = getattr(owner, part)
    setattr(owner, last, value)


class explained:
    """A context in which any error of the program is Rejected with its line."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type | None, error: BaseException | None, _: Any) -> None:
        if isinstance(error, Exception):
            raise Rejected("program", described(error)) from error


def split(answer: Any, stateful: bool) -> tuple[Any, list[tuple[str, Any]], tuple[Any, ...]]:
    """`total` or `(total, {name: component})`, with the memory for a `stateful` program, as the
    total, named components without those that are text or None, and the memory; Rejected."""
    if not isinstance(answer, tuple) and not stateful:
        return answer, [], ()
    values: tuple[Any, ...] = answer if isinstance(answer, tuple) else (answer,)
    if len(values) != 2 + stateful:
        wanted = f"total, components, {MEMORY}: it asks for it" if stateful else "total, components"
        raise Rejected("result", f"it returns {len(values)} values; return {wanted}")
    total, parts, *kept = values
    if not isinstance(parts, Mapping):
        raise Rejected("result", f"components are a dict, not {type(parts).__name__}")
    if len(parts) > COMPONENTS:
        raise Rejected("result", f"{len(parts)} components; at most {COMPONENTS}")
    numbers = {name: value for name, value in parts.items() if not isinstance(value, str | None)}
    return total, [(clean(str(name))[:64], value) for name, value in numbers.items()], tuple(kept)


def column(name: str, value: Any, rows: int, spread: bool = False) -> np.ndarray:
    """`value` as float32 [rows]; a single number fills the column if `spread`."""
    found = _numbers(name, value, f"a tensor [{rows}]")
    if spread and found.size == 1:
        return np.full(rows, found.reshape(()), np.float32)
    return array(name, found, (rows,))


def array(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """`value` as float32 of this shape; Rejected."""
    found = _numbers(name, value, f"a tensor {list(shape)}")
    if found.shape != shape:
        problem = f"{name} has shape {list(found.shape)}; it should be {list(shape)}"
        raise Rejected("result", problem)
    return np.ascontiguousarray(found, np.float32)


def scalar(name: str, value: Any) -> float:
    """`value` as a number; Rejected if it is anything else."""
    found = _numbers(name, value, "a number")
    if found.size != 1:
        raise Rejected("result", f"{name} has shape {list(found.shape)}; it should be a number")
    return float(found.reshape(()))


def _numbers(name: str, value: Any, wanted: str) -> np.ndarray:
    if isinstance(value, Tensor):
        try:
            value = value.detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:  # sparse, bfloat16, without data
            raise Rejected("result", f"{name} is no plain float32 ({error})") from error
    if not isinstance(value, np.ndarray | np.generic | int | float):
        raise Rejected("result", f"{name} is {type(value).__name__}, not {wanted}")
    found = np.asarray(value)
    if found.dtype.kind not in "fiub":
        raise Rejected("result", f"{name} is {found.dtype}; it should be float32")
    return found


def described(error: BaseException) -> str:
    """A program's error with its line number; without paths and control characters."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    where = "" if line is None else f"line {line}: "
    return clean(f"{where}{type(error).__name__}: {error}")


def clean(text: str) -> str:
    """Untrusted text, made safe to print and to send to a model as data."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return PATHS.sub("...", printable)[:MESSAGE]


def require_sound(output: ProgramOutput, most: float) -> None:
    """Rejected if a value is not finite, or the reward exceeds `most`."""
    memory = output.memory.sum(1)  # not finite where a number of it is not
    values = {"the reward": output.total, **output.components, "the memory": memory}
    for name, value in values.items():
        bad = ~torch.isfinite(value)
        if bad.any():
            row = int(bad.nonzero()[0])
            raise Rejected(
                "result",
                f"{name} is {value[row].item()} in {int(bad.sum())} of {len(bad)} transitions",
            )
    peak = float(output.total.abs().max()) if len(output.total) else 0.0
    if peak > most:
        raise Rejected(
            "result", f"the reward reaches {peak:.4g}; at most {most:g} is allowed (reward.peak)"
        )
