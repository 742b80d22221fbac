"""README and docs are true: tree, links, file names, commands and what they configure, Python.
`python -m tests.test_docs` writes the tree of docs/architecture.md anew."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import embodied
from embodied import cli
from embodied.commands.demos import demonstrator_of
from embodied.compose import compose, options
from embodied.core.build import ConfigError
from embodied.core.config_fields import require_settings
from embodied.real_robot.deployment import Deployment, controller_settings, with_allowed

ROOT = Path(__file__).resolve().parent.parent
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *SITE]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
FOLDERS = ("embodied", "envs", "policies", "real_robot", "benchmarks", "examples")
TREE = re.compile(r"(?<=```tree\n).*?(?=```)", re.DOTALL)
CODE_BLOCK = re.compile(r"```(\w*)[^\n]*\n(.*?)```", re.DOTALL)
ON_PAPER = re.compile(r"\bmy_\w+[./]|path/to|NAME|DIR|RUN|FILE")

# By scripts/docs/hooks.py.
GENERATED = re.compile(
    r"(?:\.\./)?(?:reference/)?(?:settings_train|cli|results|what_works|options/[\w/]+)\.md"
)
FILES = (".py", ".yaml", ".md", ".json", ".NAME")
GROUPS = {
    "env",
    "experiment",
    "robot",
    "demonstrator",
    "designer",
    "learner",
    "teacher",
    "finetune",
}


def test_the_files_around_the_code_are_whole() -> None:
    """GitHub shows a template or a citation that it cannot read as nothing at all."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == about["version"] and citation["license"] == about["license"]
    assert {"cff-version", "message", "authors", "title"} <= citation.keys()
    for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        template = yaml.safe_load(file.read_text())
        if file.stem != "config":
            assert {"name", "description", "body"} <= template.keys()
            assert all("label" in part["attributes"] for part in template["body"])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["make"]
    chosen = re.findall(r"[a-z-]+", str(job["strategy"]["matrix"]["target"]))
    assert {"check", "docs", "wheel", "test", "test-all"} <= targets & set(chosen)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["id"] for hook in hooks} == {"ruff", "format", "prose"}


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = json.dumps(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    named = re.findall(r'"([^"]+\.md)"', navigation)
    written = [str(page.relative_to(ROOT / "docs")) for page in SITE]
    assert sorted(name for name in named if not GENERATED.fullmatch(name)) == sorted(written)


def test_every_exported_name_is_documented() -> None:
    """In the API reference; tests/api/test_docstrings.py runs its example."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    shown = re.findall(r"^::: embodied\.api\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(embodied.__all__)


def tree() -> str:
    """Every package, indented, with the first line of its docstring."""
    lines = []
    for top in FOLDERS:
        for file in sorted((ROOT / top).rglob("__init__.py"), key=lambda f: f.parent.parts):
            place = file.parent.relative_to(ROOT).parts
            name = "  " * (len(place) - 1) + place[-1] + "/"
            says = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n")[0]
            lines.append(f"{name:<24} {says}".rstrip())
    return "\n".join(lines) + "\n"


def test_the_tree_is_the_tree_on_disk() -> None:
    written = TREE.search(ARCHITECTURE.read_text())
    assert written is not None
    folders = [line.split()[0] for line in written[0].splitlines()]
    assert folders == [line.split()[0] for line in tree().splitlines()]
    assert written[0] == tree(), "python -m tests.test_docs writes the tree anew"


def prose(text: str) -> str:
    """Without code blocks, indented commands and code spans."""
    text = re.sub(r"^ {4,}.*(?:embodied|=).*$", "", CODE_BLOCK.sub("", text), flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def exists(path: str) -> bool:
    """Whether a path that a page mentions is a file or folder of ours (`{a,b}` are two)."""
    braces = re.search(r"\{([^}]*)\}", path)
    if braces:
        return all(exists(path.replace(braces[0], one)) for one in braces[1].split(","))
    return any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()


@cache
def defined(module: Path) -> frozenset[str]:
    """Names that a module's source defines or imports at its top."""
    names: set[str] = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            every = (each for each in ast.walk(node) if isinstance(each, ast.Name))
            names |= {each.id for each in every if isinstance(each.ctx, ast.Store)}
    return frozenset(names)


def is_ours(dotted: str) -> bool:
    """Whether a dotted name is a module of ours, or something that one defines."""
    words = dotted.split(".")
    for end in range(len(words), 0, -1):
        place, rest = ROOT.joinpath(*words[:end]), words[end:]
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.exists():
            return not rest or rest[0] in defined(file)
    return False


TOPS = "|".join([*FOLDERS, "configs", "tests", "docs", "scripts"])
MENTIONED = re.compile(rf"(?<![\w/.~-])(?:{TOPS})/[\w/.*{{}},-]*\w[\w*}}/]*")
DOTTED = re.compile(r"(?<![\w/.-])(?:embodied|benchmarks)(?:\.[A-Za-z_]\w*)+(?![\w(]*=)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page: Path) -> None:
    """The targets of its links, files and folders, modules and what is in them."""
    text = page.read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    local = [t.split("#")[0] for t in links if not re.match(r"\w+://|mailto:|#", t)]
    written = [target for target in local if not GENERATED.fullmatch(target)]
    assert [target for target in written if not (page.parent / target).exists()] == []
    paths = {path for path in MENTIONED.findall(text) if not ON_PAPER.search(path)}
    assert sorted(path for path in paths if not exists(path)) == []
    names = {name for name in DOTTED.findall(text) if not name.endswith(FILES)}
    assert sorted(name for name in names if not is_ours(name)) == []


def commands(text: str) -> Iterator[str]:
    """`embodied ...` in code blocks, indented blocks and code spans, one line each."""
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        if found := re.match(r"\s*(?:\$ |\| )?(?:[A-Z_]+=\S+ )*(embodied [a-z].*)", line):
            yield found[1]
    yield from re.findall(r"`(embodied [a-z][^`]*)`", joined)


def all_commands() -> list[str]:
    """Of all pages, once each; not those with a choice in them (`a|b`, `[--x]`)."""
    found = {
        command.split(" # ")[0].strip(): None
        for page in PAGES
        for command in commands(page.read_text())
    }
    return [c for c in found if not re.search(r"\[-|\w\|\w| \| |[A-Z]\.\.\.", c)]


@pytest.mark.parametrize("command", all_commands(), ids=str)
def test_commands_parse(command: str) -> None:
    """The verb and its options exist; so do groups, and all settings of a training."""
    words = [word for word in shlex.split(command)[1:] if "..." not in word]
    assert words[0] in cli.verbs()
    # The files of docs/extending.md, whose commands have their own test.
    if len(words) == 1 or words == ["robot", "folder=DIR"] or "my_configs" in words:
        return
    if words[-1] == "--help":
        with pytest.raises(SystemExit) as helped:
            cli.parse(words)
        assert not helped.value.code
        return
    cli.parse(words)
    settings = settings_in(words)
    given = dict(word.split("=", 1) for word in settings)
    for group in GROUPS & given.keys():
        if re.fullmatch(r"(?!my_)[a-z][a-z_0-9]*", given[group]):
            assert given[group] in (*options(group, [ROOT / "configs"]), "null")
    if words[0] == "train" and "resume" not in given:
        require_training(given, settings)


def settings_in(words: list[str]) -> list[str]:
    return [word for word in words if re.match(r"[\w.@]+=", word)]


def require_training(given: dict[str, str], settings: list[str]) -> None:
    """Composing a training refuses options and settings that are not there."""
    named = {key for key, value in given.items() if not value.isupper()}
    made_up = any(value.startswith("my_") for value in given.values())
    if {"experiment", "env"} & named and not made_up:
        with sentences():
            compose("train", settings)


@contextmanager
def sentences() -> Iterator[None]:
    """A sentence may name a part of a command."""
    try:
        yield
    except ConfigError as error:
        if " is not given" not in str(error):
            raise


PRIMARY = {
    "deploy": "deploy",
    "robot teleop": "teleoperate",
    "robot record": "record",
    "demos collect": "collect",
    "reward preferences": "preferences",
    "reward label": "label",
    "reward design": "design",
    "experimenter": "experimenter",
    "adopt": "adopt",
    "model train": "model_train",
}
# Runs of a page: a command for one of them (`embodied eval RUN policy.steps=1`) fits one of these.
RUNS = ("fr3_lift_flow", "two_gap_flow", "franka_lift_deploy", "fr3_lift_expo", "fr3_insert_recap")
# What a command takes before it composes the rest.
OWN_WORDS = {"deploy": "policy=", "demos collect": "policy=", "reward label": "out="}


def composable() -> list[str]:
    kinds = (*PRIMARY, "eval", "diagnose")
    made_up = re.compile(r"\.\.\.|my_|=[A-Z]+\b|=~|resume=")
    found = [each for each in all_commands() if each.removeprefix("embodied ").startswith(kinds)]
    return [each for each in found if "=" in each and not made_up.search(each)]


def wrong_with(primary: str, words: list[str], run: str) -> str:
    """What is wrong with a command, in which a run's policy and environment may be changed."""
    policy, env = trained(run)
    try:
        compose(primary, words, given={"policy/as_trained": policy, "env/as_trained": env})
    except ConfigError as error:
        return str(error)
    return ""


@cache
def trained(experiment: str) -> tuple[Any, Any]:
    words = [f"experiment={experiment}", "demos=outputs/demos", "init=outputs/bc"]
    node = compose("train", words).node
    return node.get("policy") or node["finetune"], node["env"]


@pytest.mark.parametrize("command", composable(), ids=str)
def test_what_a_command_configures_exists(command: str) -> None:
    """Robots, demonstrators, devices and all their settings are composed, as the command does."""
    words = shlex.split(command, comments=True)[1:]
    kind = " ".join(words[:2]) if " ".join(words[:2]) in PRIMARY else words[0]
    settings = settings_in(words)
    if kind in ("eval", "diagnose"):
        wrong = [wrong_with(kind, settings, run) for run in RUNS]
        assert "" in wrong, wrong
        return
    rest = [word for word in settings if not word.startswith(OWN_WORDS.get(kind, "-"))]
    if kind == "demos collect" and rest == settings and "demonstrator=" not in command:
        rest.append(f"demonstrator={demonstrator_of(settings, ())}")
    with sentences():
        node = compose(PRIMARY[kind], rest).node
        if kind in ("deploy", "robot teleop", "robot record"):
            require_robot(node["robot"])


def require_robot(node: dict[str, Any]) -> None:
    """ConfigError for settings that the robot or its driver does not have."""
    robot = controller_settings(node)
    robot.pop("_target_")
    require_settings("robot.driver", robot["driver"])
    Deployment.parse({**with_allowed(robot), "policy": ""})


if __name__ == "__main__":
    text = ARCHITECTURE.read_text()
    ARCHITECTURE.write_text(TREE.sub(lambda _: tree(), text))
