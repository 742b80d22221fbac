"""Runs a program inside the locked process, and validates what it returns.

A program is called with batches [N, ...] first. If that fails, it is called with one transition at
a time, which is what programs with `if` on a number, or without `dim=`, are written for.
"""

from __future__ import annotations
import __future__

import math
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.tensors import Tensors
from embodied.sandbox.program import Program, Rejected

COMPONENTS = 32
MESSAGE = 1500  # most characters of an error
PATHS = re.compile(r"(?:/[\w.+-]+){2,}")
FILE = "<program>"
TYPES = ["Any", "Callable", "Dict", "List", "Mapping", "Optional", "Sequence", "Tuple", "Union"]
Columns = tuple[np.ndarray, dict[str, np.ndarray]]


@dataclass(frozen=True)
class ProgramOutput:
    """Output of a program: `total` [N] and `components` [N] each, float32."""

    total: Tensor
    components: Tensors


class LoadedProgram:
    """A program's entry as a function of arrays, in the locked process only. `one_by_one`: it is
    called once per transition (None: not known before the first call)."""

    def __init__(self, program: Program, one_by_one: bool | None = None) -> None:
        self.program = program
        self.one_by_one = one_by_one
        self.names: dict[str, Any] = {
            **{name: getattr(typing, name) for name in TYPES},
            **{"torch": torch, "Tensor": torch.Tensor, "math": math, "np": np, "numpy": np},
            "__name__": "program",
        }
        sys.modules["program"] = types.ModuleType("program")  # dataclasses look for it
        # Annotations are not evaluated: they may name types of other simulators.
        flags = __future__.annotations.compiler_flag
        with explained():
            exec(compile(program.source, FILE, "exec", flags), self.names)

    def __call__(self, arrays: Sequence[np.ndarray], rows: int) -> Columns:
        """The total [rows] and the components [rows]; Rejected."""
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
        total, parts = split(self._call(values))
        named = {name: column(f"component {name}", v, rows, spread=True) for name, v in parts}
        return column("the reward", total, rows), named

    def _alone(self, values: Sequence[Any], rows: int) -> Columns:
        total, named = np.zeros(rows, np.float32), dict[str, np.ndarray]()
        for row in range(rows):
            reward, parts = split(self._call([value[row] for value in values]))
            total[row] = scalar("the reward", reward)
            for name, value in parts:
                made = named.setdefault(name, np.zeros(rows, np.float32))
                made[row] = scalar(f"component {name}", value)
        return total, named

    def _call(self, values: Sequence[Any]) -> Any:
        program, found = self.program, dict(zip(self.program.inputs, values, strict=True))
        given = {name: found[name] for name in program.parameters}
        with explained(), torch.no_grad():
            if not program.owner and not program.bare:
                return self.names[program.entry](**given)
            owner: Any = types.SimpleNamespace if program.bare else self.names[program.owner]
            made = owner.__new__(owner)  # a new `self` in each call: no batch sees another's
            for name in program.attributes:
                setattr(made, name, found[name])
            if program.bare:
                return self.names[program.entry](made, **given)
            made.__init__()
            return getattr(made, program.entry)(**given)


class explained:
    """A context in which any error of the program is Rejected with its line."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type | None, error: BaseException | None, _: Any) -> None:
        if isinstance(error, Exception):
            raise Rejected("program", described(error)) from error


def split(answer: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """`total` or `(total, {name: component})` as the total and named components; Rejected."""
    if not isinstance(answer, tuple):
        return answer, []
    if len(answer) != 2:
        raise Rejected("result", f"it returns {len(answer)} values; return total, components")
    total, parts = answer
    if not isinstance(parts, Mapping):
        raise Rejected("result", f"components are a dict, not {type(parts).__name__}")
    if len(parts) > COMPONENTS:
        raise Rejected("result", f"{len(parts)} components; at most {COMPONENTS}")
    return total, [(clean(str(name))[:64], value) for name, value in parts.items()]


def column(name: str, value: Any, rows: int, spread: bool = False) -> np.ndarray:
    """`value` as float32 [rows]; a single number fills the column if `spread`."""
    found = _numbers(name, value, f"a tensor [{rows}]")
    if spread and found.size == 1:
        return np.full(rows, found.reshape(()), np.float32)
    if found.shape != (rows,):
        raise Rejected("result", f"{name} has shape {list(found.shape)}; it should be [{rows}]")
    return np.ascontiguousarray(found, np.float32)


def scalar(name: str, value: Any) -> float:
    """`value` as a number; Rejected if it is anything else."""
    found = _numbers(name, value, "a number")
    if found.size != 1:
        raise Rejected("result", f"{name} has shape {list(found.shape)}; it should be a number")
    return float(found.reshape(()))


def _numbers(name: str, value: Any, wanted: str) -> np.ndarray:
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
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
    for name, value in {"the reward": output.total, **output.components}.items():
        bad = ~torch.isfinite(value)
        if bad.any():
            row = int(bad.nonzero()[0])
            raise Rejected(
                "result",
                f"{name} is {value[row].item()} in {int(bad.sum())} of {len(bad)} transitions",
            )
    peak = float(output.total.abs().max()) if len(output.total) else 0.0
    if peak > most:
        raise Rejected("result", f"the reward reaches {peak:.4g}; at most {most:g} is allowed")
