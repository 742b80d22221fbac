"""The gallery: a page for every environment, policy, learner, reward, teacher and robot.

Each page is made of what is written already: the option's YAML file, the docstring of its module
(method and source), the rows of the guides' tables that name it (when to take it, what was
measured), the experiments that use it, the studies that stand, the settings of its class. Read
without importing what they name: optional packages need not be installed.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import results_page
import settings_reference
import yaml

from benchmarks import evidence
from embodied.settings_tables import by_kind, option_rows, sentence

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
PICTURES = ROOT / "docs" / "images" / "options"
EXAMPLES = 3  # experiments shown on a page
NEEDED = ("demos=DIR", "demos=[EXPERT,OTHERS]", "init=RUN", "learner.prior=RUN")


@dataclass(frozen=True)
class Group:
    """A group of options: its title, its guides in docs/, and what to type with an option."""

    title: str
    guides: tuple[str, ...]
    command: str


GROUPS = {
    "env": Group(
        "Environments",
        ("environments", "environments_simulators", "environments_other"),
        "embodied check env {name}",
    ),
    "policy": Group("Policies", ("learners",), "embodied train experiment=NAME policy={name}"),
    "learner": Group("Learners", ("learners",), "embodied train env=NAME learner={name}"),
    "finetune": Group(
        "Fine-tuning", ("finetuning",), "embodied train env=NAME init=RUN finetune={name}"
    ),
    "reward": Group("Rewards", ("rewards",), "embodied train experiment=NAME reward={name}"),
    "teacher": Group(
        "Teachers", ("teachers", "levels"), "embodied train experiment=NAME teacher={name}"
    ),
    "robot": Group("Robots", ("deploy", "own_robot"), "embodied deploy robot={name} policy=RUN"),
}
SHOWN_AS = {  # options that look as another one does
    "env/envpool_metaworld_pick_place_sparse": "env/envpool_metaworld_pick_place",
    **{
        f"robot/{name}": "env/fr3_lift" for name in ("franka", "franka_sim", "sim", "sim_impedance")
    },
    **{f"robot/{name}": "env/so101_pick" for name in ("so101", "so101_sim", "two_so101_sim")},
    **{f"robot/{name}": "env/quadrotor" for name in ("crazyflie", "crazyflie_sim")},
}


def pages() -> dict[str, str]:
    """The text of every page by its path below docs/."""
    made: dict[str, str] = {}
    for name, group in GROUPS.items():
        files = sorted((CONFIGS / name).glob("*.yaml"))
        made[f"options/{name}.md"] = gallery(name, group, files)
        made |= {f"options/{name}/{file.stem}.md": page(name, file) for file in files}
    return made


def gallery(name: str, group: Group, files: list[Path]) -> str:
    """The cards of a group, below what they are for."""
    kinds = by_kind(name, files)
    guides = ", ".join(f"[{title_of(guide)}](../{guide}.md)" for guide in group.guides)
    lines = [f"# {group.title}", "", f"{len(files)} of them; which one to take: {guides}."]
    for each, same in kinds.items():
        same.sort(key=lambda file: not picture(name, file.stem))  # pictures first
        if len(kinds) > 1:
            lines += ["", f"## {each.replace('_', ' ').capitalize()}"]
        lines += ["", '<div class="cards">', *(card(name, file) for file in same), "</div>"]
    return "\n".join(lines) + "\n"


def card(group: str, file: Path) -> str:
    shown = picture(group, file.stem)
    drawn = f'<img src="../{shown}" alt="" loading="lazy">' if shown else ""
    text = escape(sentence(file))
    name = file.stem.replace("_", "_<wbr>")
    return f'<a href="{group}/{file.stem}.html">{drawn}<b>{name}</b><span>{text}</span></a>'


def picture(group: str, name: str) -> str:
    """The path below docs/ of an option's picture; empty without one."""
    file = PICTURES / f"{SHOWN_AS.get(f'{group}/{name}', f'{group}/{name}')}.webp"
    return str(file.relative_to(ROOT / "docs")) if file.exists() else ""


def page(group: str, file: Path) -> str:
    """The page of the option in `file`."""
    node: Any = yaml.safe_load(file.read_text()) or {}
    name, target = file.stem, str(node.get("_target_", ""))
    about = GROUPS[group]
    lines = [f"# {name}", "", sentence(file), ""]
    if shown := picture(group, name):
        lines += [f"![{name}](../../{shown})", ""]
    lines += section("When to take it", advice(about, name))
    lines += section("Command", commands(group, name))
    lines += section("Method and source", described(target))
    lines += section("Measured", measured(group, name))
    rows = [replace(row, key=row.key.partition(".")[2]) for row in option_rows(group, file)]
    head = [f"As `{group}.KEY=VALUE`; the defaults are those of `{name}`.", ""]
    lines += section("Settings", [*head, *settings_reference.table(rows)] if rows else [])
    code = f"`{source(target)}`, class `{target.rpartition('.')[2]}`; " if target else ""
    check = "" if group == "finetune" else f"; `embodied check {group} {name}` checks its contract"
    lines += section("Code", [f"{code}`configs/{group}/{name}.yaml`{check}."])
    return "\n".join([*lines, f"All of them: [{about.title.lower()}](../{group}.md).", ""])


def section(title: str, body: list[str]) -> list[str]:
    return [f"## {title}", "", *body, ""] if body else []


def title_of(guide: str) -> str:
    return (ROOT / "docs" / f"{guide}.md").read_text().partition("\n")[0].lstrip("# ").lower()


def advice(group: Group, name: str) -> list[str]:
    """What the tables of the guides say about an option."""
    for guide in group.guides:
        for heads, cells in table_rows(guide):
            if name in names_in(cells[0]):
                pairs = [pair for pair in zip(heads[1:], cells[1:], strict=False) if pair[1]]
                said = [f"- {h}: {c}" if h else f"- {c}" for h, c in pairs]
                if said:
                    text = here("\n".join(said), guide)
                    return [text, "", f"From [{title_of(guide)}](../../{guide}.md)."]
    return []


def names_in(cell: str) -> set[str]:
    """Options that the first cell of a row names: `a b`, `c`, `finetune=d learner=e`, and `f_*`
    none of them."""
    words = " ".join(re.findall(r"`([^`]*)`", cell.partition("(with")[0])).split()
    return {word.partition("=")[2] or word for word in words}


@cache
def table_rows(guide: str) -> list[tuple[list[str], list[str]]]:
    """The rows of all tables of a guide, each with the heads of its table."""
    found, heads = list[tuple[list[str], list[str]]](), list[str]()
    lines = (ROOT / "docs" / f"{guide}.md").read_text().splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if not line.startswith("|"):
            heads = []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if after.startswith("|---"):
            heads = cells
        elif heads and not line.startswith("|---"):
            found.append((heads, cells))
    return found


def here(text: str, guide: str) -> str:
    """Words of a guide with their links as they are from the page of an option."""
    text = re.sub(r"\]\((?!\w+:|#)", "](../../", text)
    return text.replace("](#", f"](../../{guide}.md#")


def commands(group: str, name: str) -> list[str]:
    """How to run it: experiments that use it, otherwise its words."""
    found = [e for e, used in experiments().items() if used.get(group) == name][:EXAMPLES]
    lines = [f"# {said(e)}\nembodied train experiment={e}{needs(e)}" for e in found]
    return ["```sh", *(lines or [GROUPS[group].command.format(name=name)]), "```"]


@cache
def experiments() -> dict[str, dict[str, str]]:
    """The chosen options of every experiment by group, those with fewest words first."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted((CONFIGS / "experiment").glob("*.yaml"), key=lambda f: (len(f.stem), f)):
        chosen: dict[str, str] = {}
        for each in (yaml.safe_load(file.read_text()) or {}).get("defaults", []):
            for key, value in each.items() if isinstance(each, dict) else ():
                chosen[key.removeprefix("override ").lstrip("/")] = str(value)
        found[file.stem] = chosen
    return found


def said(experiment: str) -> str:
    return sentence(CONFIGS / "experiment" / f"{experiment}.yaml").rstrip(".")


def needs(experiment: str) -> str:
    """Words that an experiment does not run without, as its sentence has them."""
    text = (CONFIGS / "experiment" / f"{experiment}.yaml").read_text()
    return "".join(f" {word}" for word in NEEDED if word in text)


def source(target: str) -> str:
    """The file of a class."""
    return f"{target.rpartition('.')[0].replace('.', '/')}.py"


def described(target: str) -> list[str]:
    """What the module and the class of an option say about its method."""
    file = ROOT / source(target)
    if not target or not file.exists():
        return []
    text = about_class(file, target.rpartition(".")[2])
    return [re.sub(r"(?<!`)(\[[^\]\n]*\])(?=[\[(])", r"`\1`", text)]


def about_class(file: Path, name: str) -> str:
    """What a module's docstring says about one of its classes: the part that begins with `NAME: `
    up to that of the next class; all of it where there is no such part."""
    tree = ast.parse(file.read_text())
    text = ast.get_docstring(tree) or ""
    names = "|".join(part.name for part in tree.body if isinstance(part, ast.ClassDef))
    parts = re.split(rf"(?m)^(?=(?:{names}): )", text) if names else []
    return next((part for part in parts if part.startswith(f"{name}: ")), text).strip()


def measured(group: str, name: str) -> list[str]:
    """The plots of the studies that compare this option, as far as they stand."""
    found = [line for study in studies(group).get(name, ()) for line in plotted(study)]
    return [results_page.STYLE, "", *found] if found else []


def plotted(study: str) -> Iterator[str]:
    for line in results_page.section(study, results()[study]):
        yield f"#{line}" if line.startswith("###") else line


@cache
def results() -> Mapping[str, Any]:
    return {n: f for n, f in evidence.results().items() if not f["withdrawn"]}


@cache
def studies(group: str) -> dict[str, list[str]]:
    """Of each option the studies of it: the result uses it, the baseline does not."""
    found: dict[str, list[str]] = {}
    for name, facts in results().items():
        variants = evidence.study_of(name).variants
        ours, base = (chosen(group, variants[facts[side]]) for side in ("result", "baseline"))
        if ours != base and ours in re.findall(r"\w+", facts["method"]):
            found.setdefault(ours, []).append(name)
    return found


def chosen(group: str, command: str) -> str:
    """The option of a group that a command of a study chooses."""
    words = dict(word.split("=", 1) for word in shlex.split(command) if "=" in word)
    return words.get(group) or experiments().get(words.get("experiment", ""), {}).get(group, "")
