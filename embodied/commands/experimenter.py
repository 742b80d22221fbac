"""Let a language model choose which skills are trained next, and when one is learned."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from embodied.compose import allow_from, compose
from embodied.core.atomic_write import locked
from embodied.core.build import ConfigError, Node, parse
from embodied.core.saved_node import read_saved, require_inside

SAVED = "experiment.yaml"


def run(args: argparse.Namespace) -> None:
    resume = args.own["resume"]
    node = _fresh(args.words, args.config_dir) if resume is None else _resumed(resume, args.words)
    from embodied.experimenter.experiment import ExperimentConfig
    from embodied.experimenter.experiment import run as run_experiment

    config: ExperimentConfig = parse(ExperimentConfig, node, "experimenter")
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SAVED).write_text(yaml.safe_dump(node, sort_keys=False))
    budget = config.budget
    print(f"   tasks  {'; '.join(config.skills['tasks'])}")
    print(f"    chat  {config.chat.get('model') or config.chat['_target_'].rpartition('.')[2]}")
    print(f"  budget  {budget.rounds} trainings of {budget.steps:,} steps")
    print(f"  folder  {folder}", flush=True)
    with locked(folder):
        try:
            done = run_experiment(config, lambda line: print(line, flush=True))
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(f"resume with: embodied experimenter resume={folder}") from stop
    for name, skill in done.library.items():
        print(f"  learned  {name}: {skill.success:.0%}, {folder / done.run_of(skill)}")
    print(f"     log   {folder / 'log.md'}")
    if done.library:
        last = next(reversed(done.library.values()))
        print(f"next: embodied view {folder / done.run_of(last)}")


def _fresh(words: list[str], folders: list[str]) -> Node:
    made = compose("experimenter", words, folders)
    node = made.node
    node["out"] = str(node["out"] or f"outputs/experiment-{made.choices['skills']}-{node['seed']}")
    if (Path(node["out"]) / SAVED).exists():
        raise ConfigError(
            f"{node['out']} already contains an experiment: resume={node['out']}, or out=DIR"
        )
    return node


def _resumed(folder: str, words: list[str]) -> Node:
    if changed := [word for word in words if not word.startswith("allow=")]:
        raise ConfigError(f"settings cannot change on resume; omit {changed[0]}")
    file = Path(folder) / SAVED
    if not file.exists():
        raise ConfigError(f"no experiment found in {folder}")
    node = read_saved(file)
    allow_from(words)
    require_inside(node, file)
    return node | {"out": folder}
