"""The command-line reference: the help text of every command, as argparse prints it."""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

from embodied import cli
from embodied.commands import table

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


def page() -> str:
    parts = [HEAD]
    for verb, entry in table().items():
        parts.append(f"\n## embodied {verb}\n\n```text\n{help_of(verb)}```\n")
        parts += [
            f"\n### embodied {verb} {name}\n\n```text\n{help_of(verb, name)}```\n"
            for name in entry.get("kinds", ())
        ]
    return "".join(parts)
