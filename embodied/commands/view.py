"""Look at a run: the robot in 3D in your browser, with play, pause and task sliders."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", type=Path, help="a run folder or a checkpoint")
    parser.add_argument("--port", type=int, default=8080, help="on localhost (default: 8080)")
    parser.epilog = "example:\n  embodied view outputs/clone --port 8081"


def run(args: argparse.Namespace) -> None:
    from embodied.core import checkpoint
    from embodied.viewer import serve

    checkpoint.find(args.path)
    serve(args.path, args.port)
