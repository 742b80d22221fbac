"""Subcommands of the command line, one module each: `add(parser)` and `run(args)`.

The first line of a module's docstring is its help text. `args.words`: `key=value` overrides.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from embodied.core.build import ConfigError, Node

if TYPE_CHECKING:
    import torch


def add_overrides(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `key=value` overrides (`what`: their help text) and `--config-dir` to `parser`."""
    parser.add_argument("words", nargs="*", metavar="key=value", help=what)
    parser.add_argument(
        "--config-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder with your own YAML groups (may be repeated; or set EMBODIED_CONFIGS)",
    )


def take(words: Sequence[str], key: str) -> tuple[str | None, list[str]]:
    """The value of the last `key=value` among `words` (None: not given), and the other words."""
    own = [word for word in words if word.startswith(f"{key}=")]
    rest = [word for word in words if word not in own]
    return (own[-1].partition("=")[2] if own else None), rest


def require_at_least(node: Node, least: Mapping[str, float]) -> None:
    """ConfigError for a number of `node` ("eval.episodes") below its minimum."""
    for key, low in least.items():
        value = node
        for name in key.split("."):
            value = value[name]
        if isinstance(value, int | float) and value < low:
            raise ConfigError(f"{key}={value} should be at least {low:g}")


def device_of(name: str) -> torch.device:
    """The torch device of `device=NAME`; ConfigError if this machine does not have it."""
    import torch

    from embodied.training.components import pick_device

    if name.split(":")[0] not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"there is no device {name!r} (known: auto, cpu, cuda, cuda:1, ...)")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name}: torch finds no GPU here; use device=cpu")
    return pick_device(name)
