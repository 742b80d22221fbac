"""The edge of the Python API: a mistake is one line without the traceback of what is inside, and
words of other libraries are answered with ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from embodied.commands.mistakes import mistake
from embodied.commands.other_words import WORDS
from embodied.core.build import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


def edge(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of what users call: a mistake is raised anew, from here, in one line."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            _require_ours(function.__name__, kwargs)
            return function(*args, **kwargs)
        except Exception as error:
            if (line := mistake(error)) is None:
                raise
            if isinstance(error, ImportError):
                error.msg = line
            elif not isinstance(error, OSError):
                error.args = (line,)
            raise error.with_traceback(None) from None

    return called


def _require_ours(function: str, keywords: Mapping[str, Any]) -> None:
    """ConfigError for a keyword of another library; those of parts are settings of the part."""
    for word in keywords if function not in ("make_policy", "make_learner") else ():
        if ours := WORDS.get(f"{function}.{word}") or WORDS.get(word):
            raise ConfigError(f"{function}({word}=...): write {ours}", key=word, hint=ours)
