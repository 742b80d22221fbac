"""The verbs of the command line, one module each: `add(parser)` declares, `run(args)` does.

A module's first line is what `embodied --help` says; `args.words` are `key=value` overrides.
"""

from __future__ import annotations

import argparse


def add_overrides(parser: argparse.ArgumentParser, what: str) -> None:
    """Let `parser` take words (`what` says which) and folders of the user's own YAML files."""
    parser.add_argument("words", nargs="*", metavar="key=value", help=what)
    parser.add_argument(
        "--config-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder with your own YAML groups (may be repeated; or set EMBODIED_CONFIGS)",
    )
