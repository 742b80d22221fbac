"""The architecture, read from the source: who may import whom, and who may know a method's name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("embodied", "envs", "policies", "real_robot", "configs")

# A part may import itself and the parts of the layers below its own, never a neighbour.
LAYERS = (
    {"configs"},
    {"embodied.core"},
    {"embodied.embodiments", "embodied.data", "embodied.foundation", "policies"},
    {
        "envs",
        "embodied.learners",
        "embodied.rewards",
        "embodied.teachers",
        "embodied.export",
    },
    {"embodied.finetune"},
    {"embodied.loops"},
    {"embodied.compose", "embodied.design", "embodied.evidence"},
    {"embodied.bench", "embodied.viewer"},
    {"embodied.commands"},
    {"embodied.cli"},
)
ROBOT_SEES = {"real_robot", "embodied.core", "embodied.embodiments", "policies"}
SEE_ROBOT = {"envs", "embodied.bench", "embodied.viewer", "embodied.commands"}
SHARED = ("core", "loops", "data", "viewer", "commands", "cli.py", "compose.py")
METHODS = ("policy", "learner", "finetune", "reward", "teacher")
ORDINARY = {
    "act",
    "best",
    "clip",
    "goal",
    "metrics",
    "progress",
    "program",
    "reverse",
    "trajectory",
}  # plain words too


def sources(*roots: str) -> list[Path]:
    found = [p for r in roots for p in (ROOT / r).rglob("*.py")]
    return sorted(found + [ROOT / r for r in roots if r.endswith(".py")])


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported anywhere in a file of `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            start = ".".join([*above, *filter(None, [node.module])]) if node.level else node.module
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)


def part_of(name: str) -> str | None:
    """The part of the architecture that a dotted name is in; None for other people's packages."""
    words = name.split(".")
    if words[0] not in PACKAGES:
        return None
    return ".".join(words[:2]) if words[0] == "embodied" and len(words) > 1 else words[0]


def level(part: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


def allowed(importer: str, target: str) -> bool:
    if target in (importer, "embodied"):
        return True
    if importer == "real_robot":
        return target in ROBOT_SEES
    if target == "real_robot":
        return importer in SEE_ROBOT
    return level(target) < level(importer)


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parent.parts)


def wrong_imports(tree: ast.AST, importer: str, package: str) -> list[str]:
    found = []
    for line, name in imported(tree, package):
        target = part_of(name)
        # `from embodied import commands` names the part last.
        if target is not None and not allowed(importer, target):
            found.append(f"line {line}: {importer} imports {name}")
    return found


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    importer = part_of(name.removesuffix(".__init__"))
    assert importer is not None
    if importer == "embodied":
        return  # the package's own __init__
    tree = ast.parse(path.read_text())
    assert not wrong_imports(tree, importer, package_of(path))


def test_every_part_has_a_layer() -> None:
    """A new package has to be given its place."""
    parts = {
        part_of(".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
        for p in sources(*PACKAGES)
    }
    assert parts - set().union(*LAYERS) <= {"embodied", "real_robot"}


def test_only_compose_knows_hydra() -> None:
    knows = {
        path.relative_to(ROOT).as_posix()
        for path in sources(*PACKAGES)
        for _, name in imported(ast.parse(path.read_text()), package_of(path))
        if name.split(".")[0] in {"hydra", "omegaconf"}
    }
    assert knows == {"embodied/compose.py"}


def methods() -> tuple[set[str], set[str]]:
    """The names of all methods (YAML stems, classes), and their modules."""
    names, modules = set(), set()
    for file in (f for group in METHODS for f in (ROOT / "configs" / group).glob("*.yaml")):
        target = yaml.safe_load(file.read_text())["_target_"]
        module, _, cls = target.rpartition(".")
        names |= {file.stem, cls}
        modules.add(module)
    return names - ORDINARY, modules


def known_methods(tree: ast.AST, package: str, names: set[str], modules: set[str]) -> list[str]:
    """Where a file imports a method, is named after one, or has one's name in a string.

    A string counts if all of it is a method's name, or if a method's module is in it: prose and
    examples in help texts may speak of methods, code may not choose them.
    """
    found = [
        f"line {line}: import {name}"
        for line, name in imported(tree, package)
        if any(f"{name}.".startswith(f"{module}.") for module in modules)
    ]
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if id(node) not in prose and (text in names or any(m in text for m in modules)):
                found.append(f"line {node.lineno}: {text!r}")
        for field in ("id", "attr", "arg", "name", "asname"):
            word = getattr(node, field, None)
            if isinstance(word, str) and word in names:
                found.append(f"line {getattr(node, 'lineno', '?')}: {word}")
    return found


@pytest.mark.parametrize(
    "path",
    sources(*(f"embodied/{name}" for name in SHARED)),
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_shared_code_knows_no_method(path: Path) -> None:
    assert not known_methods(ast.parse(path.read_text()), package_of(path), *methods())


@pytest.mark.parametrize(
    ("text", "importer", "count"),
    [
        ("from embodied.loops.run import train", "embodied.core", 1),
        ("def f():\n    import embodied.cli", "embodied.loops", 1),
        ("from envs.gym import Gym", "embodied.learners", 1),
        ("from embodied.learners.learner import Learner", "real_robot", 1),
        ("from real_robot.arm import Limits", "embodied.loops", 1),
        ("from real_robot.arm import Limits", "embodied.commands", 0),
        ("from ..loops import run", "embodied.core", 1),
        ("from . import spec\nfrom .spec import Spec\nimport torch", "embodied.core", 0),
        ("from policies.gaussian import Gaussian", "embodied.learners", 0),
        ("from embodied import commands", "embodied.cli", 0),
        ("from embodied import cli", "embodied.commands", 1),
    ],
)
def test_the_import_check_can_fail(text: str, importer: str, count: int) -> None:
    assert len(wrong_imports(ast.parse(text), importer, importer)) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("if name == 'swim': pass", 1),
        ("TABLE = {'swim': 3}", 1),
        ("x = build('policies.swim.Swim')", 1),
        ("from policies.swim import helper", 1),
        ("from policies import swim", 2),
        ("def swim(): pass", 1),
        ("config.swim = 1", 1),
        ("class Swim: pass", 1),
        ("def f():\n    '''Not for swim.'''\n    raise ValueError('fish swim in water')", 0),
        ("swimmer = 'swims'", 0),
    ],
)
def test_the_name_check_can_fail(text: str, count: int) -> None:
    tree = ast.parse(text)
    assert len(known_methods(tree, "embodied.core", {"swim", "Swim"}, {"policies.swim"})) == count
