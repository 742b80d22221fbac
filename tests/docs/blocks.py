"""The code blocks of a page, in order: files, Python and shell commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^( *)```(?P<info>[^\n]*)\n(?P<text>.*?)^\1```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"\w+ file=(\S+)")
CELL_FILE = re.compile(r"%%writefile (\S+)\n")
SHELL = ("console", "sh", "bash")
PROGRAM = (
    r"(?:[A-Z_]+=\S+ )*(?:embodied|torchrun|python|ray|make|pip|git|cd|sh|cat|echo|export|source"
    r"|\.venv\S*/python) "
)


@dataclass(frozen=True)
class Step:
    """What a page asks for: `kind` is file, python or command; `text` is the content of the file
    `name`, the code, or one command in one line."""

    kind: str
    text: str
    name: str = ""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def steps(text: str) -> list[Step]:
    found: list[Step] = []
    start = 0
    for match in FENCED.finditer(text):
        found += _indented(text[start : match.start()])
        found += _fenced(match["info"].strip(), match["text"])
        start = match.end()
    return [*found, *_indented(text[start:])]


def _fenced(info: str, text: str) -> list[Step]:
    if file := FILE.match(info) or CELL_FILE.match(text):
        return [Step("file", CELL_FILE.sub("", text), file[1])]
    if info.startswith("python"):
        return [Step("python", text)]
    if info in SHELL or (not info and re.match(PROGRAM, text)):
        return [Step("command", line) for line in commands(text)]
    return []


def _indented(text: str) -> Iterator[Step]:
    """Of blocks that four spaces make code, those that begin with a command."""
    for is_code, lines in groupby(text.splitlines(), lambda line: line.startswith("    ")):
        block = "\n".join(line[4:] for line in lines)
        if is_code and re.match(PROGRAM, block):
            yield from (Step("command", line) for line in commands(block))


def commands(block: str) -> list[str]:
    """Each command of a shell block in one line; where some begin with `$`, the rest is output."""
    lines = re.sub(r" *\\\n\s*", " ", block).splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    bare = (re.sub(r"(^|\s+)# .*", "", line).strip() for line in lines)
    return [line for line in bare if line]
