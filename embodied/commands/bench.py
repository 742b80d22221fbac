"""Benchmarks: compare speed and learning with other projects."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
from pathlib import Path

from embodied import bench
from embodied.commands import take
from embodied.core.build import ConfigError, nearest


def suites() -> dict[str, str]:
    """The modules below embodied.bench that have a `run`, with the first line of their
    docstring."""
    found = {}
    for name, file in modules().items():
        tree = ast.parse(file.read_text())
        if any(isinstance(part, ast.FunctionDef) and part.name == "run" for part in tree.body):
            found[name] = (ast.get_docstring(tree) or "").split("\n")[0]
    return dict(sorted(found.items()))


def modules() -> dict[str, Path]:
    """The files below embodied.bench by module name."""
    return {file.stem: file for file in Path(bench.__path__[0]).rglob("*.py")}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", metavar="SUITE", help=f"one of {', '.join(suites())}")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="key=value",
        help="out=DIR: folder of the JSON files; device=cuda",
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="same as out=DIR")
    lines = [f"  {name:10} {sentence}" for name, sentence in suites().items()]
    parser.epilog = "\n".join(["suites:", *lines])


def run(args: argparse.Namespace) -> None:
    if args.suite not in (known := suites()):
        raise ConfigError(f'unknown suite "{args.suite}"{nearest(args.suite, known)}')
    out, rest = take(args.words, "out")
    device, rest = take(rest, "device")
    if rest or out == "":
        raise ConfigError(
            f'"{rest[0] if rest else "out="}" is not a setting of bench (out=DIR, device=cuda)'
        )
    from embodied.core.device import pick_device

    inside = modules()[args.suite].relative_to(bench.__path__[0]).with_suffix("")
    module = importlib.import_module(".".join([bench.__name__, *inside.parts]))
    settings = {} if device is None else {"device": pick_device(device)}
    if settings and "device" not in inspect.signature(module.run).parameters:
        raise ConfigError(f"bench {args.suite} runs on one device only; leave out device={device}")
    module.run(args.out if out is None else Path(out), **settings)
