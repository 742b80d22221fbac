"""Tables of settings for people: of one option, and of a command (configs/train.yaml).

Values are those of the YAML file, else the defaults of the class; a sentence comes from the YAML's
comment, else from the class.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from embodied.compose import options, search_folders
from embodied.core.build import Node
from embodied.core.config_fields import settings_of

WIDTH = 100
LINE = re.compile(r"^(?P<indent> *)(?P<key>[\w\"]+): *(?P<value>[^#]*?) *(?:# *(?P<says>.*))?$")


@dataclass(frozen=True)
class Row:
    """`key` as it is typed, its value or default, and what it is."""

    key: str
    value: str
    says: str


def option_rows(group: str, file: Path) -> list[Row]:
    """Every setting of an option, by the key to type (learner.gamma)."""
    node, said = _node(file), {row.key: row.says for row in yaml_rows(file)}
    target = str(node.get("_target_", ""))
    known = settings_of(target) or []
    rows = [
        Row(
            f"{group}.{setting.name}",
            shown(node[setting.name]) if setting.name in node else _read(setting.default),
            said.get(setting.name) or setting.says,
        )
        for setting in known
    ]
    named = {setting.name for setting in known} | {"_target_", "defaults"}
    more = [
        Row(f"{group}.{key}", shown(node[key]), said.get(key, ""))
        for key in node
        if key not in named
    ]
    return rows + more


def yaml_rows(file: Path) -> list[Row]:
    """The keys of a YAML file with their values and comments; nested ones are dotted."""
    rows, above = list[Row](), list[tuple[int, str]]()
    for line in file.read_text().splitlines():
        if not (found := LINE.match(line)) or found["key"] == "defaults":
            continue
        depth = len(found["indent"])
        above = [pair for pair in above if pair[0] < depth]
        key = found["key"].strip('"')
        rows.append(
            Row(".".join([*(k for _, k in above), key]), found["value"], found["says"] or "")
        )
        above.append((depth, key))
    return rows


def command_rows(primary: Path) -> list[Row]:
    """The settings of a command: its groups first, then its own, as its YAML file says them."""
    node = _node(primary)
    groups = [entry for entry in node.get("defaults", []) if isinstance(entry, dict)]
    own = [row for row in yaml_rows(primary) if row.value or row.key in node]
    chosen = [
        Row(f"{name}=NAME", shown(value), f"embodied list {name}")
        for entry in groups
        for name, value in entry.items()
    ]
    return chosen + [
        row for row in own if not isinstance(_at(node, row.key), dict) or not _at(node, row.key)
    ]


def _at(node: Node, dotted: str) -> Any:
    here: Any = node
    for key in dotted.split("."):
        here = here.get(key) if isinstance(here, dict) else None
    return here


def regime_rows(folders: Sequence[Path]) -> list[Row]:
    """The settings data.KEY of the training regimes; each says which regimes have it."""
    homes, rows = dict[str, list[str]](), dict[str, Row]()
    for name, file in options("data", folders).items():
        for row in yaml_rows(file):
            if row.key != "regime":
                homes.setdefault(row.key, []).append(name)
                rows.setdefault(row.key, row)
    return [
        Row(f"data.{key}", row.value, f"{row.says} ({', '.join(homes[key])})".strip())
        for key, row in rows.items()
    ]


def table(rows: Iterable[Row]) -> str:
    """Aligned lines of at most WIDTH characters; long sentences go on below."""
    rows = list(rows)
    if not rows:
        return "no settings"
    wide = min(max(len(row.key) for row in rows), 34)
    values = min(max(len(row.value) for row in rows), 24)
    return "\n".join(line for row in rows for line in _lines(row, wide, values))


def _lines(row: Row, wide: int, values: int) -> list[str]:
    head = f"  {row.key:<{wide}}  {row.value:<{values}}  "
    indent = " " * (wide + values + 6)
    if len(head) > len(indent):  # a long value has a line of its own
        return [
            head.rstrip(),
            *textwrap.wrap(row.says, WIDTH, initial_indent=indent, subsequent_indent=indent),
        ]
    return (
        textwrap.wrap(
            head + row.says,
            WIDTH,
            subsequent_indent=indent,
            drop_whitespace=True,
            break_long_words=False,
        )
        or [head.rstrip()]
        if len(row.says) > WIDTH - len(indent)
        else [(head + row.says).rstrip()]
    )


def shown(value: Any) -> str:
    """A value as it is typed on the command line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10_000).strip().removesuffix("\n...")
    )


def _read(default: str | None) -> str:
    """A default of the source as it is typed; the source itself where it is no plain value."""
    if default is None:
        return "(must be given)"
    try:
        value = ast.literal_eval(default)
    except (ValueError, SyntaxError):
        return default
    return shown(list(value) if isinstance(value, tuple) else value)


def _node(file: Path) -> Node:
    return yaml.safe_load(file.read_text()) or {}


def found_options(name: str, folders: Sequence[Path | str]) -> list[tuple[str, Path]]:
    """The groups that have an option `name`, and its files."""
    search = search_folders(folders)
    groups = sorted(
        {place.name for folder in search for place in folder.iterdir() if place.is_dir()}
    )
    return [(g, file) for g in groups if (file := options(g, search).get(name)) is not None]


def sentence(file: Path) -> str:
    """The description of an option: the first comment of its YAML, else its module's docstring."""
    text = file.read_text()
    comments = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    for comment in comments:
        if not comment.startswith("@package"):
            return comment
    target = str((yaml.safe_load(text) or {}).get("_target_", ""))
    return _first_line(target.rpartition(".")[0]) if target else ""


def _first_line(module: str) -> str:
    """The first line of a module's docstring, without importing it."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return ""
    if found is None or found.origin is None:
        return ""
    tree = ast.parse(Path(found.origin).read_text())
    return (ast.get_docstring(tree) or "").split("\n")[0]
