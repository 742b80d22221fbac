"""Improve a policy: race the ways that apply, and leave the best one with the proof."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from embodied.commands import demos, is_given
from embodied.commands import train as training
from embodied.commands.eval import Subject, evaluated, subject_of
from embodied.compose import options, search_folders
from embodied.core import checkpoint
from embodied.core.atomic_write import locked
from embodied.core.build import Node, build, parse, unknown
from embodied.core.children import import_from_here, module_command
from embodied.core.env import VecEnv
from embodied.core.saved_node import read_saved
from embodied.evaluation.evaluate import Evaluation, film
from embodied.evaluation.task_grid import exam
from embodied.improvement.improve import HELD_OUT, ImproveConfig, Improver
from embodied.improvement.race import Improvement
from embodied.improvement.settings import improvement_settings, joined_at, remember
from embodied.improvement.ways import Commands, save_run
from embodied.improvement.workers import Workers, answer, answers_of_this_process
from embodied.policies.remote.address import SCHEMES, allow_typed, with_mapping
from embodied.training.components import RunComponents
from embodied.training.config import read_config


def run(args: argparse.Namespace) -> None:
    report(improve(args.names[0], args.words, args.config_dir, print_line))


def report(result: Improvement) -> None:
    for name, score in result.rows.items():
        print(f"  {name:<16} {score}")
    print(f"{result}\n  policy  {result.policy}\n  report  {result.report}")
    print(f"next: embodied view {result.policy}")


def print_line(line: str) -> None:
    """Print a line in one piece: several ways may speak at the same time."""
    print(f"{line}\n", end="", flush=True)


def improve(
    policy: str,
    words: Sequence[str],
    folders: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> Improvement:
    """Improve the policy of a run, a checkpoint or a server with the settings that `words` say.

    Goes on with an interrupted improvement of the same settings, or of the folder `policy`. Each
    line about what is done is given to `tell`.
    """
    node = improvement_settings(policy, words, folders)
    out = Path(node["out"])
    allowed = [word for word in words if word.startswith("allow=")]
    command = module_command("embodied.commands.improve", str(out), policy, *allowed)
    command += [word for folder in folders for word in ("--config-dir", folder)]
    workers = Workers(command, out / "log.txt")
    improver = improver_of(node, allowed, folders, tell, workers)
    with locked(out), closing(workers):
        remember(out, node)
        if joined := joined_at(node):
            _save_joined(node, joined, allowed, folders)
        try:
            return improver.run()
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(f"go on with: embodied improve {out}") from stop


def improver_of(
    node: Node,
    allowed: Sequence[str],
    folders: Sequence[str],
    tell: Callable[[str], None],
    elsewhere: Callable[..., Any] | None = None,
) -> Improver:
    config: ImproveConfig = parse(ImproveConfig, node, "improve")
    config = replace(config, policy=str(joined_at(node) or config.policy))
    found = options("way", search_folders(folders))
    names = [*found] if config.ways is None else config.ways
    for name in (*names, *config.recipes):
        if name not in found:
            raise unknown(f'there is no way "{name}"', name, found, key="ways")
    ways: dict[str, Any] = {}
    for name in names:
        ways[name] = yaml.safe_load(found[name].read_text()) | config.recipes.get(name, {})
    commands = _commands(config.env, allowed, folders, config)
    return Improver(config, commands, ways, tell, elsewhere)


def _work(words: Sequence[str]) -> None:
    """What `Workers` starts: `words` are the folder, the policy as it was typed, and allow=."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--config-dir", action="append", default=[])
    args = parser.parse_args(words)
    out, typed, *allowed = args.words
    answers = answers_of_this_process()
    import_from_here()
    allow_typed([typed])
    node = improvement_settings(out, allowed, args.config_dir)
    answer(lambda: improver_of(node, allowed, args.config_dir, print), answers)


def _save_joined(node: Node, place: Path, allowed: Sequence[str], folders: Sequence[str]) -> None:
    policy, task = node["policy"], node["task"]
    if place.exists():
        return
    if place.suffix:
        server = {"url": policy} if policy.startswith(SCHEMES) else read_saved(Path(policy))
        server |= {} if task is None else {"prompt": task}
        place.write_text(yaml.safe_dump(with_mapping(server, node["mapping"])))
        return
    words = [f"{key}={json.dumps(node[key])}" for key in ("mapping", "task") if node[key]]
    found = subject_of(policy, [*words, *allowed], folders, there=node["env"])
    with closing(build(found.env | {"num_envs": 1}, VecEnv)) as env:
        save_run(place, found.make(env.spec), checkpoint.find(policy), node["env"], found.execute)


def _commands(env: Node, allowed: Sequence[str], folders: Sequence[str], config: Any) -> Commands:
    given = {"env/as_trained": env}

    def train(words: Sequence[str]) -> Path:
        new = None if is_given(words, "resume") else given
        return training.train([*words, *allowed], folders, False, new)

    def collect(words: Sequence[str]) -> Path:
        return demos.collect([*words, *allowed, "env=as_trained"], folders, given, False)

    def check(words: Sequence[str]) -> None:
        unused = f"out={Path(config.out) / 'ways' / 'unused'}"
        node = training.fresh([*words, *allowed, unused, "name=check"], folders, given)
        with closing(RunComponents(read_config(node))):
            pass

    def subject(policy: str, words: Sequence[str], episodes: int, seed: int) -> Subject:
        asked = [*words, *allowed, f"episodes={episodes}", f"seed={seed}"]
        asked += [f"num_envs={config.num_envs}", f"threads={config.threads}"]
        asked += [f"device={config.device}"]
        return subject_of(policy, asked, folders, there=env)

    def play(policy: str, words: Sequence[str], episodes: int, seed: int) -> Evaluation:
        return evaluated(subject(policy, words, episodes, seed), chooses=seed != HELD_OUT)[0]

    def show(
        policy: str, words: Sequence[str], episodes: int, seed: int, row: int
    ) -> tuple[Tensor, float]:
        found = subject(policy, words, episodes, seed)
        with closing(found.open_env(episodes)) as made:
            acting = found.make(made.spec).eval()
            return film(acting, *exam(made, episodes), seed, row, found.execute), made.spec.dt

    return Commands(train, collect, check, play, show)


if __name__ == "__main__":
    _work(sys.argv[1:])
