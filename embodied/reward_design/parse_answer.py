"""Extracts a program from a language model's answer: the last complete block with the function.

Reasoning (`<think>`) is left out first: the drafts in it are not the answer.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from embodied.llm.request import without_reasoning
from embodied.sandbox.program import ENTRIES, defined

OPEN = re.compile(r"^[ \t]*(`{3,}|~{3,})[^`\n]*$")
LONGEST = 200_000  # characters of an answer that are parsed


@dataclass(frozen=True)
class Extracted:
    """`source`, or None and the `problem`."""

    source: str | None
    problem: str = ""


def extract(text: str, functions: Sequence[str] = ()) -> Extracted:
    """The program of an answer that defines all `functions`, or, without any, an entry."""
    answer = without_reasoning(text[:LONGEST])
    if not answer and text.strip():
        return Extracted(None, "the answer ends within its reasoning: raise chat.max_tokens")
    blocks, cut = _blocks(answer)
    if not blocks:
        return Extracted(None, "the code block is not closed" if cut else "there is no code block")
    parsed = [(block, _defined(block)) for block in blocks]
    if all(names is None for _, names in parsed):
        return Extracted(None, "no code block is Python")
    for block, names in reversed(parsed):
        if names and (set(functions) <= names if functions else names & set(ENTRIES)):
            return Extracted(block.strip() + "\n")
    wanted = " and ".join(functions) or ENTRIES[0]
    return Extracted(None, f"no code block has the function {wanted}")


def _blocks(text: str) -> tuple[list[str], bool]:
    """The closed blocks between fences of backticks or tildes, without their indentation, and
    whether the last one is not closed."""
    found: list[str] = []
    fence = ""
    indent = 0
    lines = list[str]()
    for line in text.replace("\r\n", "\n").split("\n"):
        if not fence:
            if match := OPEN.match(line):
                fence = match[1]
                indent = len(line) - len(line.lstrip())
                lines = []
        elif line.strip() == fence:
            found.append("\n".join(lines))
            fence = ""
        else:
            lines.append(line[indent:] if not line[:indent].strip() else line)
    return found, bool(fence)


def _defined(block: str) -> set[str] | None:
    """Names of a block's functions and methods; None if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return set(defined(ast.parse(block)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
