"""The settings reference: every option of every group, its settings, types and defaults.

Read from the YAML files and the source, without importing what they name: optional packages need
not be installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe
import yaml

from embodied.commands.list import sentence

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
GROUPS = {
    "env": "Environments",
    "policy": "Policies",
    "learner": "Learners",
    "finetune": "Fine-tuning",
    "reward": "Rewards",
    "teacher": "Teachers",
    "robot": "Robots",
}
OURS = ("embodied", "envs", "policies", "real_robot")
BESIDE = ("data", "replay", "weighting", "size", "demonstrator")


def pages() -> dict[str, str]:
    """The pages by name."""
    made = {f"settings_{group}": page(group, title) for group, title in GROUPS.items()}
    return {"settings_train": runs(), **made}


def runs() -> str:
    """The settings of `embodied train` itself, and its small groups."""
    lines = [
        "# Settings of a run",
        "",
        "`embodied train KEY=VALUE ...`; nested: `eval.episodes=50`.",
        "",
    ]
    lines += ["```yaml", (CONFIGS / "train.yaml").read_text().rstrip(), "```", ""]
    for group in BESIDE:
        lines += [f"## {group}=", "", *options(group, "###")]
    return "\n".join(lines)


def page(group: str, title: str) -> str:
    head = f"`{group}=NAME`, and `{group}.KEY=VALUE`. Defaults are those of the named option."
    return "\n".join([f"# Settings: {title.lower()}", "", head, "", *options(group, "##")])


def options(group: str, level: str) -> Iterator[str]:
    for file in sorted((CONFIGS / group).glob("*.yaml")):
        node: dict[str, Any] = yaml.safe_load(file.read_text()) or {}
        target = str(node.pop("_target_", ""))
        yield from (f"{level} {file.stem}", "", sentence(file), "")
        if target:
            yield from (f"`{target}`", "")
        fields, text = settings(target)
        if text:
            yield from (" ".join(text.split()), "")
        rows = [*table(fields, node)]
        if rows:
            yield from ("| setting | default | type |", "|---|---|---|", *rows, "")


def table(fields: dict[str, tuple[str, str]], node: dict[str, Any]) -> Iterator[str]:
    """A line for each field of the class, and for what the YAML file has beside them."""
    known = {name: (kind, default) for name, (kind, default) in fields.items()}
    for name in [*known, *(key for key in node if key not in known and key != "defaults")]:
        kind, default = known.get(name, ("", ""))
        value = shown(node[name]) if name in node else default
        yield f"| `{name}` | {code(value)} | {code(kind)} |"


def shown(value: Any) -> str:
    return (
        str(yaml.safe_dump(value, default_flow_style=True, width=10_000))
        .removesuffix("\n...\n")
        .strip()
    )


def code(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return f"`{text}`" if text else ""


@cache
def package(name: str) -> griffe.Module:
    loaded = griffe.load(name, search_paths=[ROOT], resolve_aliases=False)
    assert isinstance(loaded, griffe.Module)
    return loaded


def settings(target: str) -> tuple[dict[str, tuple[str, str]], str]:
    """(type, default) of each field of the config of a class, and the config's docstring."""
    if not target:
        return {}, ""
    found = find(target)
    if not isinstance(found, griffe.Class) or (config := config_of(found)) is None:
        return {}, ""
    fields: dict[str, tuple[str, str]] = {}
    for kind in [*reversed(bases(config)), config]:
        for name, member in kind.attributes.items():
            if member.annotation is not None and "ClassVar" not in str(member.annotation):
                default = "" if member.value is None else str(member.value)
                fields[name] = (str(member.annotation), plain(default))
    return fields, config.docstring.value if config.docstring else ""


def plain(default: str) -> str:
    """A default as YAML has it."""
    if default.startswith("field("):
        return {"field(default_factory=dict)": "{}", "field(default_factory=list)": "[]"}.get(
            default, ""
        )
    known = {"None": "null", "True": "true", "False": "false"}
    try:
        value = ast.literal_eval(default)
    except (ValueError, SyntaxError):
        return known.get(default, default)
    return shown(list(value) if isinstance(value, tuple) else value)


def find(dotted: str) -> griffe.Object | None:
    """What a dotted name is, following imports."""
    top, _, rest = dotted.partition(".")
    if top not in OURS:
        return None
    try:
        found = package(top)[rest]
    except KeyError:
        return None
    return find(found.target_path) if isinstance(found, griffe.Alias) else found


def bases(kind: griffe.Class) -> list[griffe.Class]:
    """The base classes that are ours, nearest first."""
    names = [resolved(kind, str(base).split("[")[0]) for base in kind.bases]
    own = [base for base in map(find, names) if isinstance(base, griffe.Class)]
    return [each for base in own for each in (base, *bases(base))]


def resolved(kind: griffe.Class, name: str) -> str:
    """The dotted name of what a class's module calls `name`."""
    try:
        return kind.resolve(name)
    except griffe.NameResolutionError:
        return ""


def config_of(kind: griffe.Class) -> griffe.Class | None:
    """The dataclass that the constructor's parameter `config` is annotated with."""
    for each in (kind, *bases(kind)):
        made = each.members.get("__init__")
        if isinstance(made, griffe.Function) and "config" in made.parameters:
            name = str(made.parameters["config"].annotation)
            found = find(each.resolve(name))
            return found if isinstance(found, griffe.Class) else None
    return None
