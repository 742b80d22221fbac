"""The command-line reference: the help text of every command, as argparse prints it."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections.abc import Iterator
from unittest import mock

from embodied import cli

HEAD = """# Command line

`embodied COMMAND --help` prints the same text. Words `key=value` are settings: those of `train` are
listed in [settings](settings_train.md).
"""


def help_of(*words: str) -> str:
    """What `embodied WORDS --help` prints."""
    text = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "100"}),
        contextlib.redirect_stdout(text),
        contextlib.suppress(SystemExit),
    ):
        cli.parse([*words, "--help"])
    return text.getvalue()


def subcommands(verb: str) -> Iterator[str]:
    """The second words that a command takes, such as `collect` of `demos`."""
    seen: list[str] = []
    add = argparse._SubParsersAction.add_parser  # pyright: ignore[reportPrivateUsage]

    def spy(self: object, name: str, **more: object) -> argparse.ArgumentParser:
        seen.append(name)
        return add(self, name, **more)  # type: ignore[arg-type]

    with mock.patch.object(argparse._SubParsersAction, "add_parser", spy):
        help_of(verb)
    return (name for name in seen if name not in cli.verbs())


def page() -> str:
    parts = [HEAD]
    for verb in cli.verbs():
        parts.append(f"\n## embodied {verb}\n\n```text\n{help_of(verb)}```\n")
        parts += [
            f"\n### embodied {verb} {name}\n\n```text\n{help_of(verb, name)}```\n"
            for name in subcommands(verb)
        ]
    return "".join(parts)
