"""A checked program as a function of tensors, and what its answer has to look like."""

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
MESSAGE = 1500  # characters of an error that are shown
PATHS = re.compile(r"(?:/[\w.+-]+){2,}")


@dataclass(frozen=True)
class ProgramOutput:
    """What a program answered: `total` [N] and `components` [N] each, float32."""

    total: Tensor
    components: Tensors


Compiled = Callable[..., Any]


def compiled(
    checked: Checked, device: torch.device | str = "cpu", entry: str = "reward"
) -> Compiled:
    """The program's entry as a Python function, with no builtins and no names but the table's."""

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
    """Ask the program once; Rejected where its answer has the wrong form, and at `layer` where it
    fails."""
    try:
        with torch.no_grad():
            answer = function(*inputs)
    except Rejected:
        raise
    except Exception as error:  # whatever the program did wrong is the answer to its author
        raise Rejected(layer, described(error)) from error
    return formed(answer, rows)


def described(error: BaseException) -> str:
    """An error of a program, with the program's own line; no paths, no control characters."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<program>":
            line = trace.tb_lineno
        trace = trace.tb_next
    where = "" if line is None else f"line {line}: "
    return clean(f"{where}{type(error).__name__}: {error}")


def clean(text: str) -> str:
    """Untrusted text, fit to be shown and to be sent to a model as data."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return PATHS.sub("...", printable)[:MESSAGE]


def formed(answer: Any, rows: int) -> ProgramOutput:
    """`total` or `(total, {name: component})`, each [rows]; Rejected otherwise."""
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


def require_sound(paid: ProgramOutput, most: float) -> None:
    """Rejected where a number is not finite, or the reward is larger than `most`."""
    for name, value in {"the reward": paid.total, **paid.components}.items():
        bad = ~torch.isfinite(value)
        if bad.any():
            row = int(bad.nonzero()[0])
            raise Rejected(
                "result", f"{name} is {value[row].item()} in {int(bad.sum())} of {len(bad)} rows"
            )
    peak = float(paid.total.abs().max()) if len(paid.total) else 0.0
    if peak > most:
        raise Rejected("result", f"the reward reaches {peak:.4g}; at most {most:g} is allowed")
