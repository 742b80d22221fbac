"""Extracts a program from a language model's answer: the longest code block with the function.

All functions of the block are kept. Habitual imports of modules that a program has anyway are
removed and reported; nothing else is changed.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass

FENCE = re.compile(r"```[ \t]*[\w+-]*[ \t]*\n(.*?)```", re.DOTALL)
HABIT = re.compile(
    r"^(?:import torch(?: as \w+)?|import math|import numpy as np|import numpy"
    r"|from typing import [\w, ]+|from torch import Tensor)[ \t]*$",
    re.MULTILINE,
)
LONGEST = 200_000  # characters of an answer that are parsed


@dataclass(frozen=True)
class Extracted:
    """`source`, or None and the `problem`; `removed`: lines that were removed."""

    source: str | None
    problem: str = ""
    removed: tuple[str, ...] = ()


def extract(text: str, functions: tuple[str, ...] = ("reward",)) -> Extracted:
    """The program of an answer that defines `functions`."""
    blocks = [block.replace("\r\n", "\n") for block in FENCE.findall(text[:LONGEST])]
    if not blocks:
        cut = "```" in text
        return Extracted(None, "the code block is not closed" if cut else "there is no code block")
    parsed = [(block, _defined(block)) for block in blocks]
    usable = [block for block, names in parsed if names and set(functions) <= names]
    if not usable:
        wanted = " and ".join(functions)
        if all(names is None for _, names in parsed):
            return Extracted(None, "no code block is Python")
        return Extracted(None, f"no code block has the function {wanted}")
    source = max(usable, key=len)
    removed = tuple(match.group().strip() for match in HABIT.finditer(source))
    return Extracted(HABIT.sub("", source).strip() + "\n", "", removed)


def _defined(block: str) -> set[str] | None:
    """Names of a block's functions; None if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(block)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
