"""Evaluation of a checked program, and validation of its output."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.core.tensors import Tensors
from embodied.sandbox.allow_list import Checked, Rejected
from embodied.sandbox.table import TABLE
from embodied.sandbox.values import PREFIX, own

COMPONENTS = 32
MESSAGE = 1500  # most characters of an error
PATHS = re.compile(r"(?:/[\w.+-]+){2,}")


@dataclass(frozen=True)
class ProgramOutput:
    """Output of a program: `total` [N] and `components` [N] each, float32."""

    total: Tensor
    components: Tensors


Compiled = Callable[..., Any]


def compiled(
    checked: Checked, device: torch.device | str = "cpu", entry: str = "reward"
) -> Compiled:
    """The program's entry as a Python function, without builtins and with the table's names
    only."""

    def tensor(data: Any) -> Tensor:
        if isinstance(data, Tensor):
            return data.float()
        return torch.tensor(data, dtype=torch.float32, device=device)

    names: dict[str, Any] = {own(name): function.call for name, function in TABLE.items()}
    names |= {own("tensor"): tensor, PREFIX + "range": range, "__builtins__": {}}
    exec(compile(checked.tree, "<program>", "exec"), names)
    return names[entry]


def call(
    function: Compiled, inputs: Sequence[Tensor], rows: int, layer: str = "result"
) -> ProgramOutput:
    """Call the program once; Rejected at `layer` if it raises, at "result" if its output is
    malformed."""
    try:
        with torch.no_grad():
            answer = function(*inputs)
    except Rejected:
        raise
    except Exception as error:  # any error of the program is reported to its author
        raise Rejected(layer, described(error)) from error
    return formed(answer, rows)


def described(error: BaseException) -> str:
    """A program's error with its line number; without paths and control characters."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<program>":
            line = trace.tb_lineno
        trace = trace.tb_next
    where = "" if line is None else f"line {line}: "
    return clean(f"{where}{type(error).__name__}: {error}")


def clean(text: str) -> str:
    """Untrusted text, made safe to print and to send to a model as data."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return PATHS.sub("...", printable)[:MESSAGE]


def formed(answer: Any, rows: int) -> ProgramOutput:
    """Validate `total` or `(total, {name: component})`, each [rows]; Rejected otherwise."""
    total, parts = answer, {}
    if isinstance(answer, tuple):
        if len(answer) != 2:
            raise Rejected("result", f"it returns {len(answer)} values; return total, components")
        total, parts = answer
    if not isinstance(parts, Mapping):
        raise Rejected("result", f"components are a dict, not {type(parts).__name__}")
    if len(parts) > COMPONENTS:
        raise Rejected("result", f"{len(parts)} components; at most {COMPONENTS}")
    named = {
        clean(str(name))[:64]: _column(f"component {name}", part, rows)
        for name, part in parts.items()
    }
    return ProgramOutput(_column("the reward", total, rows), named)


def _column(name: str, value: Any, rows: int) -> Tensor:
    if not isinstance(value, Tensor):
        raise Rejected("result", f"{name} is {type(value).__name__}, not a tensor [{rows}]")
    if tuple(value.shape) != (rows,):
        raise Rejected("result", f"{name} has shape {list(value.shape)}; it should be [{rows}]")
    if value.dtype.is_complex:
        raise Rejected("result", f"{name} is {value.dtype}; it should be float32")
    return value.detach().float()


def require_sound(output: ProgramOutput, most: float) -> None:
    """Rejected if a value is not finite, or the reward exceeds `most`."""
    for name, value in {"the reward": output.total, **output.components}.items():
        bad = ~torch.isfinite(value)
        if bad.any():
            row = int(bad.nonzero()[0])
            raise Rejected(
                "result", f"{name} is {value[row].item()} in {int(bad.sum())} of {len(bad)} rows"
            )
    peak = float(output.total.abs().max()) if len(output.total) else 0.0
    if peak > most:
        raise Rejected("result", f"the reward reaches {peak:.4g}; at most {most:g} is allowed")
