"""`embodied new`: a working part of one's own to begin with: its file, its YAML file, its test."""

from __future__ import annotations

import argparse
import keyword
from pathlib import Path
from string import Template

from embodied.checks.choose import KINDS
from embodied.core.build import ConfigError, nearest

WHERE = {"policy": " env=pendulum", "reward": " env=pendulum policy=gaussian learner=sac"}
"""Words that `embodied check` needs besides."""
NEXT = (
    'embodied check $kind $name --config-dir $configs "allow=[$package]"$where',
    "embodied robot describe ARM.urdf robot=$configs/robot/$name.yaml driver=$package.$name.$Name",
)


def run(args: argparse.Namespace) -> None:
    package = args.own["package"] or "my_lab"
    configs = args.own["configs"] or "my_configs"
    words = names(args.kind, args.name, package, configs)
    for path in write(words):
        print(path)
    print("next: " + Template(NEXT[args.kind == "robot"]).substitute(words))


def names(kind: str, name: str, package: str, configs: str) -> dict[str, str]:
    if kind not in KINDS:
        raise ConfigError(f'there is no kind "{kind}"{nearest(kind, KINDS)}')
    for word in (name, package):
        if not word.isidentifier() or keyword.iskeyword(word) or word != word.lower():
            raise ConfigError(f"{word} should be a lower-case Python name, as my_{kind}")
    called = "".join(part.capitalize() for part in name.split("_"))
    chosen = {"kind": kind, "name": name, "Name": called, "package": package, "configs": configs}
    return chosen | {"where": WHERE.get(kind, "")}


def write(words: dict[str, str], root: Path = Path()) -> list[Path]:
    """Write the files of a new part below `root`; returns their paths. ConfigError where one of
    them exists."""
    kind, name = words["kind"], words["name"]
    templates = Path(__file__).with_name("templates")
    test = templates / ("test_robot.txt" if kind == "robot" else "test.txt")
    files = {Path(words["package"], f"{name}.py"): (templates / f"{kind}.txt").read_text()}
    files[Path("tests", f"test_{name}.py")] = test.read_text()
    if kind != "robot":  # `embodied robot describe` writes that of an arm
        files[Path(words["configs"], kind, f"{name}.yaml")] = "_target_: $package.$name.$Name\n"
    if found := [path for path in files if (root / path).exists()]:
        raise ConfigError(f"{found[0]} exists; choose another name")
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(Template(text).substitute(words))
    return [*files]
