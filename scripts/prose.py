"""Checks the words of the documentation: `python scripts/prose.py`, a part of `make check`.

It finds words that the field uses otherwise, pages that are too long, terms that newcomers look for
in vain, and packages whose docstring does not say what belongs in them. It prints a line for each
and exits with 1.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted(DOCS.rglob("*.md")),
]
PACKAGES = ("embodied", "envs", "policies", "real_robot", "benchmarks", "examples")
LONGEST = 260  # lines of a page
FEWEST = 3  # words of the first line of a package's docstring

# Words that this project once used in senses of its own, and what the field says instead.
PRIVATE = {
    r"worlds?": "environment",
    r"counterparts?": "simulated robot, protocol emulator",
    r"clones?|cloned": "BC policy, base policy",
    r"judges?|judged|judging|judgement": "annotator, labeller",
    r"pays?|paid": "rewards, is rewarded",
    r"told|taught|foretell|foretold": "(say what it is)",
    r"nobody|somebody|whoever": "(say who)",
    r"late chunks?": "inference latency",
    r"in its noise": "latent-noise RL",
    r"rows?": "transition, parallel env, frame",
    r"held-out starts?|same starts?|starts? of its own|new starts|the starts": "initial states",
    r"arms? of (?:a|the) study|arms? are lines": "variant",
    r"is not there|that are there": "(say what is missing)",
}
# Phrases in which one of these words is fine.
ALLOWED = (
    r"real[- ]world",
    r"open[- ]world",
    r"with World Models",
    r"world frame",
    r"git clone",
    r"(?:table|first|second|last|other|these|top|bottom|block of|two|four|each) rows?",
    r"rows? (?:of the table|from the top|by row|of a matrix)",
    r"row[- ]by[- ]row",
    r"(?:above|below) rows?",
    r"in a row",
)
# What newcomers look for, in a table of the glossary.
LOOKED_FOR = (
    "replay buffer",
    "collector",
    "GAE",
    "DSRL",
    "domain randomization",
    "e-stop",
    "camera process",
    "RPC server",
    "real-time chunking",
    "run report",
)


def blank(found: re.Match[str]) -> str:
    """As many line ends as the match has: the lines after it keep their numbers."""
    return "\n" * found[0].count("\n")


def prose(text: str) -> str:
    """A page without code blocks, indented commands, code spans and the targets of links."""
    text = re.sub(r"```\w*[^\n]*\n.*?```", blank, text, flags=re.DOTALL)
    text = re.sub(r"^ {4,}.*(?:embodied|=).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "", text)
    return re.sub(r"\]\([^)]*\)", lambda found: "]" + blank(found), text)


def words(page: Path) -> Iterator[str]:
    """Words in a sense that only this project knows."""
    text = prose(page.read_text())
    for phrase in ALLOWED:
        text = re.sub(rf"\b{phrase}\b", blank, text, flags=re.IGNORECASE)
    for number, line in enumerate(text.splitlines(), 1):
        for word, better in PRIVATE.items():
            for found in re.finditer(rf"\b(?:{word})\b", line, re.IGNORECASE):
                yield f"{page.relative_to(ROOT)}:{number}: {found[0]!r}: {better}"


def length(page: Path) -> Iterator[str]:
    """A page that is too long to be read in one go; a program may write as much as it has found."""
    text = page.read_text()
    lines = len(text.splitlines())
    if lines > LONGEST and "do not edit it by hand" not in text:
        yield f"{page.relative_to(ROOT)}: {lines} lines, at most {LONGEST}"


def terms() -> Iterator[str]:
    """Terms that the tables of the glossary do not lead to."""
    text = (DOCS / "glossary.md").read_text()
    for term in LOOKED_FOR:
        shown = rf"^\|.*\b{re.escape(term)}\b.*`\w+/[\w/.]+`"
        if not re.search(shown, text, re.IGNORECASE | re.MULTILINE):
            yield f"docs/glossary.md: not in a table: {term}"


def packages() -> Iterator[str]:
    """Packages whose docstring does not say in its first line what belongs in them."""
    for file in sorted(file for top in PACKAGES for file in (ROOT / top).rglob("__init__.py")):
        first = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
        if len(first.split()) < FEWEST:
            yield f"{file.relative_to(ROOT)}:1: say in a line what belongs in this package"


def problems() -> Iterator[str]:
    """All of them, a line each."""
    for page in PAGES:
        yield from words(page)
        yield from length(page)
    yield from terms()
    yield from packages()


if __name__ == "__main__":
    found = [*problems()]
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
