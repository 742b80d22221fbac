"""Show the settings of an option, or the whole configuration of a run, without running it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import yaml

from embodied.core.build import ConfigError, nearest


def run(args: argparse.Namespace) -> None:
    words = [word for word in args.words if not word.startswith("allow=")]
    if not words:
        raise ConfigError("say what: embodied show learner=NAME, or experiment=NAME")
    group, _, name = words[0].partition("=")
    if len(words) == 1 and group != "experiment":
        print(option(group, name, args.config_dir))
    else:
        print(configuration(args.words, args.config_dir), end="")


def configuration(words: Sequence[str], folders: Sequence[str]) -> str:
    """The composed settings of a run as YAML, as its run.yaml will have them."""
    from embodied.commands.train import fresh

    return yaml.safe_dump(fresh(words, folders), sort_keys=False)


def option(group: str, name: str, folders: Sequence[str]) -> str:
    """The sentence and the table of one option. ConfigError for one that is not there."""
    from embodied.compose import options, search_folders

    search = search_folders(folders)
    known = options(group, search)
    if not name:
        raise ConfigError(f'cannot read "{group}": expected GROUP=NAME{nearest(name, known)}')
    if not known:
        groups = {place.name for folder in search for place in folder.iterdir() if place.is_dir()}
        raise ConfigError(f'there is no group "{group}"{nearest(group, groups)}')
    if name not in known:
        raise ConfigError(f'there is no {group} "{name}"{nearest(name, known)}')
    return text_of(group, known[name])


def text_of(group: str, file: Path) -> str:
    """The sentence and the settings of the option in `file`."""
    from embodied.settings_tables import option_rows, sentence, table

    head = f"{group}={file.stem}: {sentence(file)}".rstrip(": ")
    if group == "experiment":
        return f"{head}\n(all of it: embodied show experiment={file.stem})\n{file.read_text()}"
    return f"{head}\n{table(option_rows(group, file))}"
