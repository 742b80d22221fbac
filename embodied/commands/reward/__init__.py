"""`embodied reward ...`: design rewards, score and label datasets with them, compare them.

Every subcommand is a module of this folder: its first line is the help text, `add(parser)` declares
the arguments, `run(args)` runs it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import pkgutil
from pathlib import Path


def kinds() -> dict[str, str]:
    """Help texts of the subcommands by module name."""
    folder = Path(__path__[0])
    texts = {m.name: (folder / f"{m.name}.py").read_text() for m in pkgutil.iter_modules(__path__)}
    return {
        name: (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
        for name, text in texts.items()
    }


def add(parser: argparse.ArgumentParser) -> None:
    known = kinds()
    named = {name.replace("_", "-"): name for name in known}
    kind = parser.add_subparsers(dest="kind", metavar="|".join(named), required=True)
    for word, name in named.items():
        module = importlib.import_module(f"{__name__}.{name}")
        own = kind.add_parser(
            word,
            help=known[name],
            description=known[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add(own)
        own.set_defaults(run_kind=module.run)


def run(args: argparse.Namespace) -> None:
    args.run_kind(args)
