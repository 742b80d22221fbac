"""The architecture, read from the source: who imports whom, no circles, who may name a method."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("envs", "policies", "real_robot", "configs")  # embodied/NAME is a link to each
OURS = re.compile(rf"^\s*(from|import)\s+([\w. ]+,\s*)*({'|'.join(FOLDERS)})\b", re.MULTILINE)
PRODUCT = ("embodied", *FOLDERS)
PACKAGES = (*PRODUCT, "benchmarks")

# A part may import itself and the parts of the layers above it in this list, never a neighbour.
LAYERS = [
    {"benchmarks" if name == "benchmarks" else f"embodied.{name}" for name in line.split()}
    for line in (
        "configs",
        "core",
        "nn",
        "embodiments datasets",
        "serve llm",
        "buffers vision sandbox policies",
        "models",
        "envs learners rewards teachers export adopt",
        "evaluation importers",
        "training",
        "reports",
        "compose",
        "mistakes",
        "study improvement",
        "reward_design",
        "viewer deploy settings_tables experimenter",
        "checks",
        "commands",
        "api",
        "cli",
        "__main__",
        "benchmarks",
    )
]
ROBOT_SEES = ("real_robot", "core", "datasets", "embodiments", "policies")
SEE_ROBOT = ("envs", "checks", "viewer", "commands", "deploy")
"""Below `embodied`; `benchmarks` too."""
SHARED = (
    *("core", "nn", "datasets", "buffers", "training"),
    *("evaluation", "reports", "viewer", "deploy", "commands"),
)
METHODS = ("policy", "learner", "finetune", "reward", "teacher")
ORDINARY = {  # plain words too
    *("act", "best", "clip", "deterministic", "edit", "goal", "metrics", "normal", "Program"),
    *("progress", "program", "realtime", "reverse", "ticket", "trajectory", "Trajectory"),
    "uniform",
}


def sources(*roots: str) -> list[Path]:
    found = [p for r in roots for p in (ROOT / r).rglob("*.py")]
    return sorted(found + [ROOT / r for r in roots if r.endswith(".py")])


@dataclass(frozen=True)
class Facts:
    """What the tests ask of a file; the syntax trees of all files would take 300 MB.

    `imports`: (line, dotted name) of everything that it imports anywhere; `functions`: (line, name,
    number of lines).
    """

    imports: list[tuple[int, str]]
    functions: list[tuple[int, str, int]]


@cache
def facts_of(path: Path) -> Facts:
    tree = ast.parse(path.read_text())
    functions = [
        (node.lineno, node.name, (node.end_lineno or 0) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return Facts([*imported(tree, package_of(path))], functions)


def places_of(*roots: str) -> Iterator[tuple[Path, int, str]]:
    """Every import of the files below `roots`: file, line and dotted name."""
    for path in sources(*roots):
        for line, name in facts_of(path).imports:
            yield path, line, name


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
    if words[0] == "benchmarks":
        return words[0]
    return ".".join(words[:2]) if words[0] == "embodied" else None


def level(part: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


def allowed(importer: str, target: str) -> bool:
    if target in (importer, "embodied"):
        return True
    if importer == "embodied.real_robot":
        return target.removeprefix("embodied.") in ROBOT_SEES
    if target == "embodied.real_robot":
        return importer == "benchmarks" or importer.removeprefix("embodied.") in SEE_ROBOT
    return level(target) < level(importer)


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return f"embodied.{name}" if name.partition(".")[0] in FOLDERS else name


def package_of(path: Path) -> str:
    return module_of(path.parent / "__init__.py")


def test_imports_point_downwards() -> None:
    wrong = []
    for path, line, name in places_of(*PACKAGES):
        importer, target = part_of(module_of(path)), part_of(name)
        assert importer is not None
        # `from embodied import commands` names the part last.
        own = importer == "embodied"  # the package's own __init__
        if not own and target is not None and not allowed(importer, target):
            wrong.append(f"{path.relative_to(ROOT)}: line {line}: {importer} imports {name}")
    assert not wrong


def test_every_part_has_a_layer() -> None:
    parts = {part_of(module_of(p)) for p in sources(*PACKAGES)}
    assert parts - set().union(*LAYERS) <= {"embodied", "embodied.real_robot"}


def test_only_compose_knows_hydra() -> None:
    hydra = ("hydra", "omegaconf")
    knows = {path for path, _, name in places_of(*PACKAGES) if name.split(".")[0] in hydra}
    assert knows == {ROOT / "embodied" / "compose.py"}


def import_edges() -> dict[str, set[str]]:
    """Which of our modules each of our modules imports, also inside functions."""
    modules = {module_of(path): path for path in sources(*PACKAGES)}
    return {
        module: {
            next((n for n in (name, name.rpartition(".")[0]) if n in modules), module)
            for _, name in facts_of(path).imports
        }
        - {module}
        for module, path in modules.items()
    }


def test_the_folders_are_imported_below_embodied() -> None:
    """`envs`, `policies`, `real_robot` and `configs` may be a user's own packages."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources(*PACKAGES, "tests", "scripts")
        if OURS.search(path.read_text())  # few do, and a syntax tree of each file takes long
        for line, name in facts_of(path).imports
        if name.split(".")[0] in FOLDERS
    ]
    assert wrong == []
    for name in FOLDERS:
        assert (ROOT / "embodied" / name).resolve() == ROOT / name


def test_no_import_circles() -> None:
    TopologicalSorter(import_edges()).prepare()  # CycleError names the modules of one


def test_functions_and_files_are_short() -> None:
    """A function has at most 60 lines, a file 600."""
    files = {path: len(path.read_text().splitlines()) for path in sources(*PACKAGES)}
    assert {path: n for path, n in files.items() if n > 600} == {}
    functions = {
        f"{path}:{line} {name}": length
        for path in files
        for line, name, length in facts_of(path).functions
    }
    assert {name: n for name, n in functions.items() if n > 60} == {}


@cache
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


def chosen_methods(tree: ast.AST) -> list[str]:
    """Where a message or an example tells the reader to choose a method ("learner=swim")."""
    told = re.compile(rf"\b({'|'.join(METHODS)})=(\w+)")
    return [
        f"line {node.lineno}: {group}={name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for group, name in told.findall(node.value)
        if (ROOT / "configs" / group / f"{name}.yaml").exists()
    ]


def test_shared_code_knows_no_method() -> None:
    """Messages neither; only the command line's help shows methods, as examples."""
    files = ("embodied/cli.py", "embodied/compose.py", "real_robot")
    wrong = []
    for path in sources(*(f"embodied/{name}" for name in SHARED), *files):
        tree = ast.parse(path.read_text())
        found = known_methods(tree, package_of(path), *methods())
        found += [] if "commands" in path.parts else chosen_methods(tree)
        wrong += [f"{path.relative_to(ROOT)}: {line}" for line in found]
    assert not wrong


def test_the_processes_that_move_an_arm_import_no_torch() -> None:
    """Two seconds and 200 MB in each of them: control, driver, and what stands in for a robot."""
    made = "driver", "emulator", "controller"
    needed = {"embodied.real_robot.control.main", "embodied.real_robot.safety.learned_reflex"}
    for file in (ROOT / "configs/robot").glob("*.yaml"):
        parts = yaml.safe_load(file.read_text())
        named = re.findall(r"embodied\.[\w.]+(?=\.)", str([parts.get(name) for name in made]))
        needed |= {*named, *filter(None, [parts.get("kinematics", "").rpartition(".")[0]])}
    assert len(needed) > 15
    code = f"import sys, {', '.join(sorted(needed))}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
