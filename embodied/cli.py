"""The `embodied` command line; its subcommands are in `embodied.commands`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, NoReturn

from embodied.commands import Parser, add_all, function, table
from embodied.core import run_packages
from embodied.core.build import ConfigError, build, nearest
from embodied.core.children import import_from_here
from embodied.core.errors import ContractError, ContractWarning, RemoteError, RobotError

STOPPED = 130
OPTIONS = {"export": "--to", "demo": "--out"}
"""Commands whose output folder is an option: `out=DIR` means it too."""
ERRORS = {
    "CheckpointError": "embodied.core.checkpoint",
    "NotFinite": "embodied.core.env",
    "SpecMismatch": "embodied.core.spec",
    "DatasetError": "embodied.datasets.lerobot.schema",
    "ChatError": "embodied.llm.chat",
    "ClientError": "embodied.real_robot.daemon.client",
    "FolderError": "embodied.real_robot.daemon.server",
    "RequestError": "embodied.real_robot.daemon.requests",
    "RpcServerError": "embodied.real_robot.daemon.server",
    "DriverError": "embodied.real_robot.kernel.driver",
    "KeyFileError": "embodied.real_robot.remote.keys",
}
"""Errors that say in one line what to do, and the modules that define them."""


def verbs() -> dict[str, str]:
    """The subcommands' names and descriptions."""
    return {name: entry["help"] for name, entry in table().items()}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a subcommand; `function(args.run)(args)` runs it."""
    known = verbs()
    parser = Parser(
        prog="embodied",
        description="Train, evaluate, view and deploy robot policies.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  embodied list experiments\n"
        "  embodied train experiment=pendulum_sac seed=1\n"
        "  embodied train experiment=pendulum_sac size=debug\n"
        "  embodied train resume=outputs/RUN\n"
        "  embodied eval outputs/RUN episodes=500\n"
        "  embodied view outputs/RUN\n"
        "  embodied demos collect env=fr3_lift episodes=50 out=outputs/demos",
    )
    parser.add_argument("--version", action="version", version=f"embodied {version()}")
    if not argv:
        parser.print_help()
        sys.exit(0)
    verb = next((word for word in argv if not word.startswith("-")), None)
    if verb is not None and verb not in known:
        raise ConfigError(f'there is no command "{verb}"{nearest(verb, known)}')
    if option := OPTIONS.get(verb or ""):  # `out=DIR` is this option of the command
        split = [[option, w.partition("=")[2]] if w.startswith("out=") else [w] for w in argv]
        argv = [word for part in split for word in part]
    subparsers = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    add_all(subparsers, table(), "", only=verb or "")
    args, rest = parser.parse_known_args(argv)
    # argparse ends a list of words at the first option; overrides may follow it.
    if rest and (not hasattr(args, "words") or any(word.startswith("-") for word in rest)):
        line = f"unknown argument {rest[0]} (see embodied {args.verb} --help)"
        if hasattr(args, "words"):  # as `--seed 3`: settings are written without dashes
            key, _, value = rest[0].lstrip("-").partition("=")
            after = argv[argv.index(rest[0]) + 1 :]
            value = value or next((word for word in after if not word.startswith("-")), "VALUE")
            line += f"; settings are written {key}={value}"
        raise ConfigError(line)
    if rest:
        args.words += rest
    return args


def version() -> str:
    """The installed version."""
    try:
        return metadata.version("embodied-rl")
    except metadata.PackageNotFoundError:
        return "unknown"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a subcommand; a user error prints one line to stderr and exits with code 2."""
    warnings.showwarning = _shown_in_one_line(warnings.showwarning)
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        words = [*map(str, vars(args).values()), *getattr(args, "words", [])]
        if added := run_packages.recall(words):  # allowed when the user trained these runs
            import_from_here()
            print(f"embodied: allow=[{','.join(added)}], as when it was trained", file=sys.stderr)
        function(args.run)(args)
    except KeyboardInterrupt as stop:
        print(f"embodied: stopped{f'; {stop}' if str(stop) else ''}", file=sys.stderr)
        sys.exit(STOPPED)
    except BrokenPipeError:  # the reader of our output (head, less) has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if (line := mistake(error)) is None:
            raise
        print(f"embodied: {line}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def _shown_in_one_line(usual: Callable[..., None]) -> Callable[..., None]:
    """A `warnings.showwarning` that prints our warnings in one line, without source code, and once
    where both the environment of training and that of evaluation are warned about."""
    printed: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, ContractWarning):
            if str(message) not in printed:
                print(f"embodied: {message}", file=sys.stderr)
            printed.add(str(message))
        else:
            usual(message, category, *where, **more)

    return show


def mistake(error: Exception) -> str | None:
    """The error message of a user error, in one line; None for a bug (which gets a traceback)."""
    if isinstance(error, tuple(_one_line_errors())):
        return " ".join(str(error).split())
    if isinstance(error, ValueError) and (where := _refused(error)) is not None:
        return f"{where}{' '.join(str(error).split())}"
    if isinstance(error, ModuleNotFoundError) and not _ours(error.name):
        return f'the package {error.name} is missing: pip install "embodied-rl[all]"'
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch's
        return f"this needs more memory than there is: {str(error).partition(chr(10))[0][:200]}"
    return None


def _one_line_errors() -> Iterator[type[Exception]]:
    """The errors whose message is for the user, of those modules that are imported: torch is not
    imported to classify a mistake."""
    yield from (ConfigError, ContractError, RemoteError, RobotError)
    for name, place in ERRORS.items():
        if place in sys.modules:
            yield getattr(sys.modules[place], name)


def _refused(error: ValueError) -> str | None:
    """The prefix of an error about settings; None if the error is not about settings.

    Errors raised inside `build` get the name of the class that was built; those of our own
    constructors get none.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, _ in frames:
        if frame.f_code is build.__code__:
            return f"{frame.f_locals['node'].get('_target_')}: "
    last, _ = frames[-1]
    ours = _ours(last.f_globals.get("__name__"))
    return "" if ours and last.f_code.co_name in ("__init__", "__post_init__") else None


def _ours(module: str | None) -> bool:
    return module is None or module.split(".")[0] == "embodied"


if __name__ == "__main__":
    main()
