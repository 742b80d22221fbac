"""Export a policy to ONNX, C header, TorchScript or Crazyflie app, checked against PyTorch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from embodied.commands import require_folders
from embodied.core.build import ConfigError

if TYPE_CHECKING:
    from embodied.export.decision import Decision


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", help="a run folder, or a checkpoint in one")
    parser.add_argument(
        "words", nargs="*", metavar="allow=[PACKAGE]", help="packages of your own in the run"
    )
    parser.add_argument("--to", required=True, metavar="DIR", help="the folder to write to")
    parser.add_argument("--onnx", action="store_true", help="DIR/policy.onnx (the default)")
    parser.add_argument("--header", action="store_true", help="DIR/policy.h: C99, plain layers")
    parser.add_argument("--torchscript", action="store_true", help="DIR/policy.pt: for libtorch")
    parser.add_argument("--crazyflie", action="store_true", help="DIR: a Crazyflie firmware app")
    parser.epilog = (
        "examples:\n"
        "  embodied export outputs/bc --to exported\n"
        "  embodied export outputs/hover --to exported --onnx --header\n"
        "  embodied export outputs/hover --to app --crazyflie\n"
        '  embodied export outputs/mine "allow=[my_lab]" --to exported'
    )


def run(args: argparse.Namespace) -> None:
    from embodied.compose import allow_from

    if unknown := [word for word in args.words if not word.startswith("allow=")]:
        raise ConfigError(f"{unknown[0]} has no place here: embodied export RUN --to DIR")
    require_folders([str(args.path)])
    import torch

    from embodied.core import checkpoint
    from embodied.export.c_header import write_header
    from embodied.export.crazyflie import trained_on, write_crazyflie
    from embodied.export.decision import Decision, Export, facts
    from embodied.export.onnx import write_onnx, write_torchscript

    allow_from(args.words)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    decision = Decision(checkpoint.load_policy(args.path))
    about = facts(decision, Path(args.path))
    folder = Path(args.to)
    if folder.is_file():
        raise ConfigError(f"--to {folder} is a file: give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Export] = []
    if args.onnx or not (args.header or args.torchscript or args.crazyflie):
        made.append(write_onnx(decision, about, folder / "policy.onnx"))
    if args.header:
        made.append(write_header(decision, about, folder / "policy.h"))
    if args.torchscript:
        made.append(write_torchscript(decision, about, folder / "policy.pt"))
    if args.crazyflie:
        made.append(write_crazyflie(decision, about, trained_on(Path(args.path)), folder))
    print(f"inputs    {', '.join(described(decision))}; noise: {about['noise']}")
    print(f"output    actions [n, {about['chunk']}, {decision.policy.spec.act.size}] in [-1, 1]")
    for export in made:
        size = f"{export.path.stat().st_size / 1000:,.0f} kB"
        found = "not compared" if export.difference is None else f"{export.difference:.1e}"
        print(f"wrote     {export.path} ({size})")
        print(f"          largest difference to PyTorch: {found} ({export.checked_by})")


def described(decision: Decision) -> list[str]:
    """Every input with its type and shape."""
    kinds = [*decision.leaves.values(), None]
    shapes = [tuple(value.shape[1:]) for value in decision.example(1)]
    return [
        f"{name} {leaf.dtype if leaf else 'float32'}[{', '.join(['n', *map(str, shape)])}]"
        for name, leaf, shape in zip(decision.inputs, kinds, shapes, strict=True)
    ]
