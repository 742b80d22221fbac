"""The settings of a run: those of `embodied train` and of its small groups, with their defaults.

Read from the YAML files and the source, without importing what they name: optional packages need
not be installed. Environments, methods and robots have pages of their own (option_pages).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from embodied.core.config_fields import config_of
from embodied.settings_tables import Row, command_rows, option_rows, regime_rows, sentence

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
BESIDE = ("data", "replay", "weighting", "size", "demonstrator", "model")


def page() -> str:
    """The settings of `embodied train` itself, and its small groups."""
    lines = [
        "# Settings of a run",
        "",
        "`embodied train KEY=VALUE ...`; nested: `eval.episodes=50`.",
        "",
    ]
    lines += table(command_rows(CONFIGS / "train.yaml"))
    lines += ["", "## data.KEY", "", *table(regime_rows([CONFIGS])), ""]
    for group in BESIDE:
        lines += [f"## {group}=", "", *options(group, "###")]
    return "\n".join(lines)


def options(group: str, level: str) -> Iterator[str]:
    for file in sorted((CONFIGS / group).glob("*.yaml")):
        target = str((yaml.safe_load(file.read_text()) or {}).get("_target_", ""))
        yield from (f"{level} {file.stem}", "", sentence(file), "")
        if target:
            yield from (f"`{target}`", "")
        if text := docstring(target):
            yield from (" ".join(text.split()), "")
        if rows := option_rows(group, file):
            short = [replace(row, key=row.key.partition(".")[2]) for row in rows]
            yield from (*table(short), "")


def table(rows: Iterable[Row]) -> list[str]:
    """A Markdown table."""
    return ["| setting | default | type | |", "|---|---|---|---|", *map(line, rows)]


def line(row: Row) -> str:
    """A row of a Markdown table."""
    kind, says = (text.replace("|", "\\|") for text in (row.kind, row.says))
    return f"| {code(row.key)} | {code(row.value)} | {kind} | {says} |"


def code(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return f"`{text}`" if text else ""


def docstring(target: str) -> str:
    """The docstring of the settings of a class."""
    found = config_of(target)
    return "" if found is None else ast.get_docstring(found[1]) or ""
