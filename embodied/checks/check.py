"""Runs checks: functions that raise ContractError; their docstrings say what has to be true."""

from __future__ import annotations

import inspect
import io
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

import torch

from embodied.core.build import ConfigError
from embodied.core.env import NotFinite
from embodied.core.errors import ContractError, NotApplicable, RobotError
from embodied.core.spec import SpecMismatch

Check: TypeAlias = Callable[[Any], None]
"""Takes what is checked; raises ContractError, NotApplicable, or another error of the user's."""
LINES = (ContractError, ConfigError, NotFinite, RobotError, SpecMismatch, ModuleNotFoundError)
"""Errors whose message says in one line what to do."""


@dataclass(frozen=True)
class Result:
    """`says`: what has to be true; `line`: what is wrong, or why it was not checked."""

    name: str
    says: str
    kind: Literal["ok", "wrong", "skipped"]
    line: str = ""


def require(holds: object, line: str) -> None:
    """ContractError with `line` unless `holds`."""
    if not holds:
        raise ContractError(line)


def skip(line: str) -> NoReturn:
    """This part need not keep that promise."""
    raise NotApplicable(line)


def from_file(state: Any) -> Any:
    """A state as a checkpoint gives it back: loaded weights-only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def alike(one: Any, other: Any) -> bool:
    """Whether nested states are the same, their tensors to the bit; NaN is as NaN."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype
        return same and torch.equal(one.nan_to_num(7e7), other.nan_to_num(7e7))
    return one == other or (one != one and other != other)


def checks_of(module: str) -> tuple[Check, ...]:
    """The checks of a module: its functions of a `subject` alone that return nothing, in order."""
    functions = [f for f in vars(sys.modules[module]).values() if inspect.isfunction(f)]
    signatures = {f: inspect.signature(f) for f in functions if f.__module__ == module}
    return tuple(
        f
        for f, signature in signatures.items()
        if [*signature.parameters] == ["subject"] and signature.return_annotation == "None"
    )


def run_checks(checks: Iterable[Check], subject: Any) -> Iterator[Result]:
    """The result of each check; after the first check has failed (it builds the part), no more."""
    for number, check in enumerate(checks):
        result = _result(check, subject)
        yield result
        if number == 0 and result.kind == "wrong":
            return


def _result(check: Check, subject: Any) -> Result:
    name = check.__name__.replace("_", " ")
    says = (check.__doc__ or name).strip().partition("\n")[0].rstrip(".")
    try:
        check(subject)
    except NotApplicable as reason:
        return Result(name, says, "skipped", str(reason))
    except LINES as error:
        return Result(name, says, "wrong", " ".join(str(error).split()))
    except Exception as error:  # the user's own code
        return Result(name, says, "wrong", raised(error))
    return Result(name, says, "ok")


def raised(error: Exception) -> str:
    """An exception in one line, with its place."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} ({last.filename}:{last.lineno})"
