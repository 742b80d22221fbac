"""Resume an interrupted run (same as `train resume=RUN`)."""

from __future__ import annotations

import argparse

from embodied.commands import add_overrides
from embodied.commands.train import train


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", help="a run folder, or one of its checkpoints")
    add_overrides(parser, "settings to change, such as steps=200000")
    parser.epilog = "example:\n  embodied resume outputs/pendulum_sac-0"


def run(args: argparse.Namespace) -> None:
    train([*args.words, f"resume={args.path}"], args.config_dir)
