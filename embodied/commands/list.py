"""List the options of a group; show the settings of an option, or all of a run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from embodied.compose import PACKAGED, options, search_folders
from embodied.core.build import ConfigError, nearest
from embodied.settings_tables import (
    command_rows,
    found_options,
    option_rows,
    paper_rows,
    published,
    regime_rows,
    sentence,
    table,
)


def show(args: argparse.Namespace) -> None:
    words = [word for word in args.words if not word.startswith("allow=")]
    if not words:
        raise ConfigError("say what: embodied show learner=NAME, or experiment=NAME")
    group, _, name = words[0].partition("=")
    if len(words) == 1 and group != "experiment":
        print(option(group, name, args.config_dir))
    else:
        print(configuration(args.words, args.config_dir), end="")


def configuration(words: Sequence[str], folders: Sequence[str]) -> str:
    from embodied.commands.train import fresh

    return yaml.safe_dump(fresh(words, folders), sort_keys=False)


def option(group: str, name: str, folders: Sequence[str]) -> str:
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
    head = f"{group}={file.stem}: {sentence(file)}".rstrip(": ")
    if group == "experiment":
        return f"{head}\n(all of it: embodied show experiment={file.stem})\n{file.read_text()}"
    return f"{head}\n{table(option_rows(group, file))}"


def settings(primary: str) -> str:
    rows = command_rows(PACKAGED / f"{primary}.yaml")
    rows += regime_rows([PACKAGED]) if primary == "train" else []
    return table(row for row in rows if row.key != "policy")  # it is no setting, but a word


EMPTY = ("reward", "teacher", "robot", "filter")  # groups that may have no packaged options


PLURALS = {"data": "data", "policy": "policies"}
PURPOSES = {
    "manipulate with an arm": (
        *("fr3", "so101", "maniskill", "envpool_metaworld", "envpool_fetch", "envpool_franka"),
        *("envpool_aloha", "metaworld", "fetch", "ogbench", "robosuite", "pusht", "libero"),
    ),
    "manipulate with a hand": ("envpool_adroit", "envpool_leap", "envpool_myo", "adroit"),
    "walk": (
        *("ant", "humanoid", "hopper", "halfcheetah", "walker2d", "stump_track", "mjlab"),
        *("envpool_g1", "envpool_h1", "envpool_go1", "envpool_walker", "envpool_halfcheetah"),
    ),
    "fly": ("quadrotor",),
    "drive": ("drive", "race"),
    "balance": ("pendulum", "cartpole", "inverted_pendulum"),
    "navigate, explore and survive": (
        *("maze", "minigrid", "babyai", "envpool_doorkey", "crafter", "rooms", "two_gap"),
        "contact_maze",
    ),
    "deploy on a robot": ("robot",),
    "any environment by its id": ("gym", "gymnasium_process"),
    "imagine by a learned model": ("imagined",),
}
"""What one can do in environments of these names, or NAME_MORE; others are listed by package."""
GROUPED = 20  # groups of more options are shown by the package of their classes


def run(args: argparse.Namespace) -> None:
    folders = search_folders(args.config_dir)
    groups = {p.name for folder in folders for p in folder.iterdir() if any(p.glob("*.yaml"))}
    groups |= {*EMPTY}
    names = {plural(group): group for group in sorted(groups)}
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
    kinds = {name: kind(group, file) for name, file in found.items()}
    order = [*PURPOSES, *sorted({*kinds.values()} - {*PURPOSES})]
    for each in (each for each in order if each in kinds.values()):
        print(f"{each}:")
        print(lines({n: s for n, s in said.items() if kinds[n] == each}, "  "))


def lines(said: Mapping[str, str], indent: str = "") -> str:
    width = max(map(len, said), default=0)
    return "\n".join(f"{indent}{n:{width}}   {text}".rstrip() for n, text in said.items())


def plural(group: str) -> str:
    return PLURALS.get(group, f"{group}s")


def kind(group: str, file: Path) -> str:
    """What one can do in an environment, by its file's name; otherwise the package."""
    if group == "env":
        for purpose, names in PURPOSES.items():
            if any(file.stem == name or file.stem.startswith(f"{name}_") for name in names):
                return purpose
    return package(file)


def package(file: Path) -> str:
    """The package of an option's class below its folder (embodied.envs.fr3.env.Fr3: fr3); of an
    environment in wrappers, that of the environment."""
    node: Any = yaml.safe_load(file.read_text()) or {}
    while isinstance(node.get("env"), dict) and "_target_" in node["env"]:
        node = node["env"]
    words = str(node.get("_target_", "")).removeprefix("embodied.").split(".")
    return words[1] if len(words) > 2 else words[0]
