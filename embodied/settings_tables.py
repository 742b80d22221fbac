"""Tables for people: settings of an option and of a command (configs/train.yaml), and papers.

Values are those of the YAML file, else the defaults of the class. What a setting is says the
comment on its field's line; a key that no class has, the comment in the YAML file.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from embodied.compose import DATA, PACKAGED, PRIMARY, groups_of, options, search_folders
from embodied.core.bounds import Count
from embodied.core.build import Node, parse
from embodied.core.config_fields import Setting, fields_of, in_words, settings_of
from embodied.core.saved_node import parse_yaml

WIDTH = 100
PAPER = re.compile(r"^# paper:\n(?:#  .*\n)+", re.MULTILINE)
ARCHIVES = {"arXiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}
COMMENTED = re.compile(r"^(\w+):[^#\n]*# *(.*)$", re.MULTILINE)  # a key, and what it is


@dataclass(frozen=True)
class Row:
    """`key` as it is typed, its value or default, what it is, and its type in words."""

    key: str
    value: str
    says: str
    kind: str = ""


@dataclass(frozen=True)
class Paper:
    """A published system that an option implements: a `# paper:` block of its YAML file, which is
    YAML in comments, as no setting of a run is in it."""

    title: str  # of the paper
    year: Count  # in which it appeared
    id: str  # arXiv:NUMBER, doi:NUMBER or an address
    run: str  # the command that runs it; DIR and RUN are folders of the user's
    evidence: tuple[str, ...]  # anchors of the evidence pages: STUDY, or STUDY-VARIANT
    differs: str  # what differs from the paper, as far as it is known

    @property
    def address(self) -> str:
        archive, _, number = self.id.partition(":")
        return f"{ARCHIVES[archive]}{number}" if archive in ARCHIVES else self.id


def papers(file: Path) -> list[Paper]:
    """The published systems of an option. ConfigError for a field that is missing or unknown."""
    blocks = [re.sub("^# ?", "", each, flags=re.M) for each in PAPER.findall(file.read_text())]
    return [parse(Paper, parse_yaml(each, str(file))["paper"], f"{file}, paper") for each in blocks]


def published(folders: Sequence[Path]) -> list[tuple[str, Path, Paper]]:
    """Every published system of the options in `folders`, with its group and file, sorted."""
    files = [(g, file) for g in groups_of(folders) for file in options(g, folders).values()]
    return [(group, file, paper) for group, file in files for paper in papers(file)]


def paper_rows(folders: Sequence[Path]) -> Iterator[Row]:
    """Of every published system: its option, then a line each of what is known about it."""
    for group, file, paper in published(folders):
        yield Row(f"{group}={file.stem}", "", f"{paper.title} ({paper.year}, {paper.id})")
        evidence = f"docs/papers.md, {', '.join(paper.evidence)}"
        differs = f"differs from the paper: {paper.differs}"
        for line in (sentence(file), paper.run, f"evidence: {evidence}", differs):
            yield Row("", "", line)


def option_rows(group: str, file: Path) -> list[Row]:
    """Every setting of an option, by the key to type (learner.gamma)."""
    node = _node(file)
    known = settings_of(str(node.get("_target_", ""))) or []
    return [*class_rows(f"{group}.", known, node), *_other_rows(f"{group}.", known, node, file)]


def class_rows(prefix: str, settings: Iterable[Setting], node: Node) -> Iterator[Row]:
    for setting in settings:
        value = shown(node[setting.name]) if setting.name in node else _default(setting)
        yield Row(f"{prefix}{setting.name}", value, setting.says, in_words(setting.kind))


def _other_rows(prefix: str, known: Sequence[Setting], node: Node, file: Path) -> Iterator[Row]:
    """The keys of `node` that are none of `known`, with the comments of its YAML file."""
    named = {setting.name for setting in known} | {"_target_", "defaults"}
    said = dict(COMMENTED.findall(file.read_text()))
    for key in node:
        if key not in named:
            yield Row(f"{prefix}{key}", shown(node[key]), said.get(key, ""))


def command_rows(primary: Path) -> list[Row]:
    """The settings of a command: its groups first, then its own, those inside others dotted."""
    node = _node(primary)
    groups = {
        k: v for each in node.get("defaults", []) if isinstance(each, dict) for k, v in each.items()
    }
    chosen = [
        Row(f"{name}=NAME", shown(v), f"embodied list {name.partition('@')[0]}")
        for name, v in groups.items()
    ]
    known = settings_of(PRIMARY.get(primary.stem, "")) or []
    own = [setting for setting in known if setting.name not in groups]
    return [*chosen, *_flat_rows("", own, node), *_other_rows("", known, node, primary)]


def _flat_rows(prefix: str, settings: Iterable[Setting], node: Node) -> Iterator[Row]:
    """The settings of a class; those of a dataclass inside of it are dotted."""
    for setting in settings:
        if is_dataclass(setting.kind):
            inner = node.get(setting.name) or {}
            yield from _flat_rows(f"{prefix}{setting.name}.", fields_of(setting.kind), inner)
        else:
            yield from class_rows(prefix, [setting], node)


def regime_rows(folders: Sequence[Path]) -> list[Row]:
    """The settings data.KEY of the training regimes; each says which regimes have it."""
    homes, rows = dict[str, list[str]](), dict[str, Row]()
    for name, file in options("data", folders).items():
        for row in class_rows("data.", settings_of(DATA.get(name, "")) or [], _node(file)):
            homes.setdefault(row.key, []).append(name)
            rows.setdefault(row.key, row)
    return [replace(row, says=f"{row.says} ({', '.join(homes[key])})") for key, row in rows.items()]


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
        says = textwrap.wrap(row.says, WIDTH, initial_indent=indent, subsequent_indent=indent)
        return [head.rstrip(), *says]
    if len(row.says) <= WIDTH - len(indent):
        return [(head + row.says).rstrip()]
    return textwrap.wrap(
        head + row.says, WIDTH, subsequent_indent=indent, break_long_words=False
    ) or [head.rstrip()]


def shown(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.strip().removesuffix("\n...")


def _default(setting: Setting) -> str:
    """A default as it is typed; as the source has it where it is no plain value."""
    if setting.default is None:
        return "(must be given)"
    try:
        return shown(setting.value())
    except LookupError:
        return setting.default


def _node(file: Path) -> Node:
    return yaml.safe_load(file.read_text()) or {}


def found_options(name: str, folders: Sequence[Path | str]) -> list[tuple[str, Path]]:
    search = search_folders(folders)
    found = [(group, options(group, search).get(name)) for group in groups_of(search)]
    return [(group, file) for group, file in found if file is not None]


def sentence(file: Path) -> str:
    """The description of an option: the first comment of its YAML, else its module's docstring."""
    text = PAPER.sub("", file.read_text())
    comments = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    for comment in comments:
        if not comment.startswith("@package"):
            return comment
    target = str((yaml.safe_load(text) or {}).get("_target_", ""))
    return _first_line(target.rpartition(".")[0]) if target else ""


def _first_line(module: str) -> str:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return ""
    if found is None or found.origin is None:
        return ""
    return (ast.get_docstring(ast.parse(Path(found.origin).read_text())) or "").split("\n")[0]


def text_of(group: str, file: Path) -> str:
    head = f"{group}={file.stem}: {sentence(file)}".rstrip(": ")
    if group == "experiment":
        return f"{head}\n(all of it: embodied show experiment={file.stem})\n{file.read_text()}"
    return f"{head}\n{table(option_rows(group, file))}"


def command_text(primary: str) -> str:
    """The settings of a command, for its help."""
    rows = command_rows(PACKAGED / f"{primary}.yaml")
    rows += regime_rows([PACKAGED]) if primary == "train" else []
    return table(row for row in rows if row.key != "policy")  # it is no setting, but a word


PURPOSES: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("purposes.yaml").read_text()
)
"""What one can do in environments of these names, or NAME_MORE; others are listed by package."""


def by_kind(group: str, files: Iterable[Path]) -> dict[str, list[Path]]:
    """The files of options by what one can do in an environment, in the order of purposes.yaml; by
    package where that is not known and for other groups."""
    ranks = {
        name: (purpose, rank)
        for purpose, names in PURPOSES.items()
        for rank, name in enumerate(names)
    }
    kinds: dict[str, list[tuple[int, Path]]] = {}
    for file in files:
        known = (
            found
            for name, found in ranks.items()
            if group == "env" and f"{file.stem}_".startswith(f"{name}_")
        )
        kind, rank = next(known, (package(file), 0))
        kinds.setdefault(kind, []).append((rank, file))
    order = [*PURPOSES, *sorted(kinds.keys() - PURPOSES.keys())]
    return {kind: [file for _, file in sorted(kinds[kind])] for kind in order if kind in kinds}


def package(file: Path) -> str:
    """The package of an option's class below its folder (embodied.envs.fr3.env.Fr3: fr3); of an
    environment in wrappers, that of the environment."""
    node: Any = yaml.safe_load(file.read_text()) or {}
    while isinstance(node.get("env"), dict) and "_target_" in node["env"]:
        node = node["env"]
    words = str(node.get("_target_", "")).removeprefix("embodied.").split(".")
    return words[1] if len(words) > 2 else words[0]
