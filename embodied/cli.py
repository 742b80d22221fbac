"""The `embodied` command line; its subcommands are in `embodied.commands`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NoReturn

from embodied.commands import Parser, add_all, checked, require_one, table
from embodied.core import run_packages
from embodied.core.build import ConfigError, nearest
from embodied.core.children import import_from_here
from embodied.core.errors import ContractWarning

STOPPED = 130
BEFORE = ("-h", "--help", "--version")  # options that need no command
ALSO = {
    "play": "view",
    "render": "view",
    "enjoy": "view",
    "run": "train",
    "fit": "train",
    "test": "eval",
    "finetune": "improve",
    "record": "demos",
    "teleop": "deploy",
    "ls": "list",
}
"""Other projects' words for our commands."""
OPTIONS = {"export": "--to", "demo": "--out"}
"""Commands whose output folder is an option: `out=DIR` means it too."""


def verbs() -> dict[str, str]:
    """The subcommands' names and descriptions."""
    return {name: entry["help"] for name, entry in table().items()}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a subcommand; `checked(args)(args)` runs it."""
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
    argv = [*argv[1:], "--help"] if argv[:1] == ["help"] else argv or ["--help"]
    verb = next((word for word in argv if not word.startswith("-")), None)
    if verb is not None and verb not in known:
        meant = ALSO.get(verb)
        hint = f' (did you mean "{meant}"?)' if meant else nearest(verb, known)
        raise ConfigError(f'there is no command "{verb}"{hint}')
    if verb is not None and argv[0].startswith("-") and argv[0] not in BEFORE:
        raise ConfigError(f"{argv[0]} stands before the command; write embodied {verb} ...")
    if option := OPTIONS.get(verb or ""):  # `out=DIR` is this option of the command
        split = [[option, w.partition("=")[2]] if w.startswith("out=") else [w] for w in argv]
        argv = [word for part in split for word in part]
    subparsers = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    add_all(subparsers, table(), {}, only=verb or "")
    args, rest = parser.parse_known_args(argv)
    require_one(rest + getattr(args, "words", []), "experiment")
    has_words = hasattr(args, "words")
    if rest and (not has_words or any(word.startswith("-") for word in rest)):
        line = f"unknown argument {rest[0]} (see embodied {args.verb} --help)"
        if has_words:  # as `--seed 3`: settings are written without dashes
            key, _, value = rest[0].lstrip("-").partition("=")
            after = argv[argv.index(rest[0]) + 1 :]
            value = value or next((word for word in after if not word.startswith("-")), "VALUE")
            line += f"; settings are written {key}={value}"
        raise ConfigError(line)
    if has_words:  # argparse ends a list of words at the first option; overrides may follow it
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
        checked(args)(args)
    except KeyboardInterrupt as stop:
        print(f"embodied: stopped{f'; {stop}' if str(stop) else ''}", file=sys.stderr)
        sys.exit(STOPPED)
    except BrokenPipeError:  # the reader of our output (head, less) has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        from embodied.mistakes import mistake

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


if __name__ == "__main__":
    main()
