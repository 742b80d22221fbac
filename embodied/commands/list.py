"""List the options of a group; show the settings of an option, or all of a run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import yaml

from embodied.compose import groups_of, options, search_folders
from embodied.core.build import ConfigError, nearest
from embodied.settings_tables import (
    by_kind,
    found_options,
    paper_rows,
    published,
    sentence,
    table,
    text_of,
)


def show(args: argparse.Namespace) -> None:
    words = [word for word in args.words if not word.startswith("allow=")]
    if not words:
        raise ConfigError("say what: embodied show learner=NAME, or experiment=NAME")
    group, _, name = words[0].partition("=")
    if len(words) > 1 or group == "experiment":
        from embodied.commands.train import fresh

        print(yaml.safe_dump(fresh(args.words, args.config_dir), sort_keys=False), end="")
        return
    search = search_folders(args.config_dir)
    known = options(group, search)
    if not name:
        raise ConfigError(f'cannot read "{group}": expected GROUP=NAME{nearest(name, known)}')
    if not known:
        raise ConfigError(f'there is no group "{group}"{nearest(group, groups_of(search))}')
    if name not in known:
        raise ConfigError(f'there is no {group} "{name}"{nearest(name, known)}')
    print(text_of(group, known[name]))


EMPTY = ("reward", "teacher", "robot", "filter")  # groups that may have no packaged options
PLURALS = {"data": "data", "policy": "policies"}
GROUPED = 20  # groups of more options are shown by the package of their classes


def run(args: argparse.Namespace) -> None:
    folders = search_folders(args.config_dir)
    groups = sorted({*groups_of(folders), *EMPTY})
    names = {plural(group): group for group in groups}
    if not args.words:
        print("embodied list GROUP shows the options of a group:")
        counts = {name: len(options(group, folders)) for name, group in names.items()}
        print(lines({name: str(n) for name, n in counts.items()}))
        print(f"embodied list papers: the {len(published(folders))} published systems among them")
    for word in args.words:
        if word == "papers":
            print(table(paper_rows(folders)))
        elif (group := names.get(word, word)) in groups:
            _print_group(group, options(group, folders))
        elif found := found_options(word, args.config_dir):
            print("\n\n".join(text_of(group, file) for group, file in found))
        else:
            raise ConfigError(f'there is no group "{word}"{nearest(word, names)}')


def _print_group(group: str, found: Mapping[str, Path]) -> None:
    if not found:
        print(f"no options; add DIR/{group}/NAME.yaml and --config-dir DIR")
    said = {name: sentence(file) for name, file in found.items()}
    if len(found) <= GROUPED or group == "experiment":
        print(lines(said))
        return
    for each, files in by_kind(group, found.values()).items():
        print(f"{each}:")
        print(lines({file.stem: said[file.stem] for file in files}, "  "))


def lines(said: Mapping[str, str], indent: str = "") -> str:
    width = max(map(len, said), default=0)
    return "\n".join(f"{indent}{n:{width}}   {text}".rstrip() for n, text in said.items())


def plural(group: str) -> str:
    return PLURALS.get(group, f"{group}s")
