"""What commands of this package share: their arguments, and the environment of their children."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from embodied.commands import take
from embodied.core.build import ConfigError
from embodied.core.device import pick_device
from embodied.mistakes import mistake

ROOT = Path(__file__).resolve().parent.parent
"""The repository's root, in which the package `benchmarks` is."""


def main(run: Callable[..., Any]) -> NoReturn:
    """Measure with `run` as the words of the command line say.

    A user's mistake is one line on stderr and exit code 2.
    """
    put_root_on_path()
    try:
        run(**settings(run, sys.argv[1:]))
    except Exception as error:
        line = mistake(error)
        if line is None:
            raise
        print(f"benchmarks: {line}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def settings(run: Callable[..., Any], words: Sequence[str]) -> dict[str, Any]:
    """The arguments of `run` in `words`: `out=DIR`, and `device=NAME` where `run` has a device.

    ConfigError for any other word.
    """
    out, rest = take(words, "out")
    device, rest = take(rest, "device")
    if rest or out == "":
        word = rest[0] if rest else "out="
        raise ConfigError(f'"{word}" is not a setting of a benchmark (out=DIR, device=cuda)')
    found: dict[str, Any] = {"out": Path(out or "outputs/bench")}
    if device is not None:
        if "device" not in inspect.signature(run).parameters:
            raise ConfigError(f"it runs on one device only; leave out device={device}")
        found["device"] = pick_device(device)
    return found


def put_root_on_path() -> None:
    """Let every process that this one starts import `benchmarks`, from whatever folder."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, paths)])
