"""The edge of the Python API: mistakes in one line, answers to words of other libraries."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from embodied.commands import answer, mistake
from embodied.core.build import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


def edge(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of what users call: a mistake is raised from here, without the traceback inside."""
    name, own = function.__name__, inspect.signature(function).parameters
    of_parts = name in ("make_policy", "make_learner")  # what keywords are settings of

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            for word in () if of_parts else kwargs.keys() - own.keys():
                if ours := answer("keywords", f"{name}.{word}") or answer("keywords", word):
                    raise ConfigError(f"{name}({word}=...){ours}", key=word)
            return function(*args, **kwargs)
        except Exception as error:
            if (line := mistake(error)) is None:
                raise
            if not isinstance(error, OSError):
                error.args = (line,)
            if isinstance(error, ImportError):
                error.msg = line
            raise error.with_traceback(None) from None

    return called
