"""Rewards: label, score and compare with them, fit them to recorded episodes, design programs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.progress import Progress as Bar

from embodied.commands import is_given, require_at_least, yaml_values
from embodied.commands.demos import usual_demonstrator
from embodied.compose import compose
from embodied.core.atomic_write import write_json
from embodied.core.build import ConfigError, Node, build, nearest, parse
from embodied.core.saved_node import read_saved
from embodied.datasets.hub import local_folder


def label(args: argparse.Namespace) -> None:
    from embodied.datasets.lerobot.reader import read_episodes
    from embodied.reports.datasets import RECORDED, answered_episodes, label_dataset

    out = args.own["out"]
    settings, state, origin = chosen(args.own["reward"], args.words, args.config_dir, "label")
    try:
        with Bar() as bar:
            task = bar.add_task("episodes", total=None)
            about = label_dataset(
                Path(args.names[0]),
                Path(out),
                settings["reward"],
                state,
                origin,
                settings["gamma"],
                lambda done, total: bar.update(task, completed=done, total=total),
            )
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"{out} is kept; run the same command to continue") from stop
    episodes = read_episodes(Path(out))
    labels, recorded = (episodes.steps[key].mean() for key in ("reward", RECORDED))
    answered = answered_episodes(episodes)
    count = f"{len(episodes)} episodes"
    if answered < len(episodes):
        count = f"{answered} of {count} answered (the others keep the recorded reward's part)"
    shown = f"mean label {labels:.4g}, mean recorded {recorded:.4g}, reward {about['hash'][:12]}"
    print(f"{out}: {count}, {shown}")
    print(f"next: embodied train experiment=NAME demos={out}")


def chosen(
    name: str, words: list[str], folders: list[str], command: str
) -> tuple[Node, Any, str | None]:
    """Settings of `command` with the reward's node, its state, and the hash of the state's
    source."""
    from embodied.core import checkpoint

    option, given, state = _named(name)
    settings = compose(command, [f"reward={option}", *words], folders, given).node
    require_at_least(settings, {"gamma": 0})
    origin = checkpoint.file_hash(checkpoint.find(name) / "loop.pt") if state else None
    return settings, state, origin


def _named(name: str) -> tuple[str, dict[str, Node], Any]:
    """The option that a reward's name, run or YAML file is, that option's node where it is no file
    of ours, and its state (None: untrained)."""
    if Path(name).is_dir():
        from embodied.reports.datasets import of_run

        node, state = of_run(Path(name))
        return "saved", {"reward/saved": node}, state
    if name.endswith(".yaml") and Path(name).exists():
        return "given", {"reward/given": read_saved(Path(name))}, None
    return name, {}, None


def score(args: argparse.Namespace) -> None:
    import torch

    from embodied.datasets.lerobot.reader import read_episodes
    from embodied.reports import datasets as scoring

    name = args.own["reward"]
    settings, state, origin = chosen(name, args.words, args.config_dir, "score")
    require_at_least(settings, {"episodes": 1, "seed": 0, "threads": 1})
    torch.set_num_threads(settings["threads"])
    source = local_folder(args.names[0])
    out = Path(settings["out"] or f"outputs/score-{Path(name).name}")
    episodes = read_episodes(source, settings["episodes"])
    found: dict[str, list[dict[str, Any]]] = {}
    for camera, node in scoring.cameras(settings["reward"], settings["cameras"]).items():
        folder, title = out / camera, f"{Path(name).name} {camera}".strip()
        rows = found[camera] = _rows(episodes, {**settings, "reward": node}, state, folder)
        facts = scoring.summary(rows, settings["threshold"])
        about = scoring.provenance(source, node, origin, settings["gamma"])
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "score.json", {"about": about, "summary": facts, "episodes": rows})
        scoring.draw(rows, title, folder / "score.png")
        print(f"{camera}:" if camera else "", end="\n" if camera else "")
        scoring.show(rows, facts)
        if len(rows) < len(episodes):
            print(f"{len(rows)} of {len(episodes)} episodes answered; the others are left out")
        print(f"{folder}/score.json  {folder}/score.png")
    for line in scoring.between_cameras(found):
        print(line)


def _rows(episodes: Any, settings: Node, state: Any, out: Path) -> list[dict[str, Any]]:
    from embodied.reports import datasets as scoring

    node, gamma = settings["reward"], settings["gamma"]
    reward = scoring.make_reward(node, state, episodes.spec, gamma, 1, settings["seed"], out)
    if state is None and node.get("trained") is None:
        scoring.require_ready(reward, "score")
    with Bar() as bar:
        task = bar.add_task("episodes", total=len(episodes))
        return scoring.score(
            episodes, reward, gamma, lambda done, _: bar.update(task, completed=done)
        )


def fit_classifier(args: argparse.Namespace) -> None:
    import torch

    from embodied.rewards.success.model import Training, load_labelled, made, mark_of, write

    folders = args.names
    out = args.own["out"]
    seed = int(args.own["seed"] or 0)
    given = yaml_values(args.words)
    known = [field.name for field in fields(Training)]
    for key in given:
        if key not in known:
            raise ConfigError(f'no setting "{key}"{nearest(key, [*known, "out", "seed"])}')
    how: Training = parse(Training, given, "embodied reward")
    torch.set_num_threads(1)
    whole, leaves = load_labelled(folders, how, seed)
    net, c = made(whole, leaves, how, seed)
    mark = mark_of(whole, how, seed)
    facts = {"version": 1, "fingerprint": mark, "data": folders, "training": asdict(how)}
    write(Path(out), net, leaves, c, json.loads(json.dumps(facts)))
    print(f"{out}: version 1, held-out frames: {c.successes} positive, {c.others} negative")
    print(f"  temperature  {c.temperature:.2f}, log loss {c.loss_before:.3f} to {c.loss:.3f}")
    print(f"  calibration  expected calibration error {c.error_before:.3f} to {c.error:.3f}")
    print(
        f"  threshold    {c.threshold:.3f}: true positives {c.found:.0%}, false "
        f"positives {c.mistaken:.2%}"
    )
    print(f"next: embodied train ... reward.trained={out}")


def preferences(args: argparse.Namespace) -> None:
    folders = args.names
    node = compose("preferences", args.words, args.config_dir).node
    require_at_least(node, {"seed": 0, "threads": 1})
    if not 0 < node["held_out"] < 1:
        raise ConfigError(f"held_out={node['held_out']} must be between 0 and 1")
    import torch

    from embodied.datasets.transitions import read_joined
    from embodied.reports.datasets import label_by_preferences

    out = Path(node["out"])
    if (out / "meta").exists():
        raise ConfigError(f"{out} already contains a dataset; choose another folder: out=DIR")
    torch.set_num_threads(node["threads"])
    episodes = read_joined(folders)
    print(f"{', '.join(folders)}: {len(episodes)} episodes; labelling pairs", flush=True)
    _print_report(out, label_by_preferences(node, episodes, local_folder(folders[0])))


def _print_report(out: Path, report: dict[str, float]) -> None:
    print(f"{out}: rewards learned from {report['labels']:.0f} labels; on held-out episodes:")
    lines = {
        "accuracy": "{:.0%} agreement with the labeller",
        "pairs": "{:.0%} of pairs ordered as by the recorded reward",
        "returns": "rank correlation {:.2f} with the recorded returns",
    }
    for name, line in lines.items():  # a dataset without rewards has no reference
        if not math.isnan(report[name]):
            print(f"  {name:8} {line.format(report[name])}")
    print(f"next: embodied train experiment=NAME demos={out}")


def compare(args: argparse.Namespace) -> None:
    plain = [word for word in args.words if word[:2] not in ("a.", "b.")]
    if not is_given(plain, "demonstrator") and (name := usual_demonstrator(plain, args.config_dir)):
        plain.append(f"demonstrator={name}")
    chosen = [
        choose(name, plain, [w[2:] for w in args.words if w.startswith(letter)], args.config_dir)
        for letter, name in zip(("a.", "b."), args.names, strict=True)
    ]
    settings = {**chosen[0][0], "policy": args.own["policy"] or "mixture"}
    least = {"episodes": 1, "num_envs": 1, "seed": 0, "epic_rows": 0, "epic_means": 1}
    require_at_least(settings, {**least, "threads": 1})
    import torch

    from embodied.core.env import VecEnv
    from embodied.reports.reward_comparison import compare_in, draw, show

    torch.set_num_threads(settings["threads"])
    with closing(build(settings["env"] | {"num_envs": settings["num_envs"]}, VecEnv)) as env:
        facts = compare_in(env, settings, [each[1] for each in chosen])
    show(facts, args.names)
    labels = [Path(name).stem for name in args.names]
    folder = Path(settings["out"] or f"outputs/compare-{'-'.join(labels)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.json").write_text(json.dumps(facts, indent=1))
    draw(facts, labels, folder / "compare.png")
    print(f"{folder}/compare.json  {folder}/compare.png")


def choose(
    name: str, words: Sequence[str], own: Sequence[str], folders: Sequence[str]
) -> tuple[Node, tuple[Node | None, Any]]:
    """Settings of the comparison, and one reward: its node (None: the environment's) and its state
    (None: untrained)."""
    if name == "own":
        if own:
            raise ConfigError(
                f"the environment's reward has no setting {own[0]} here; set env.KEY=VALUE"
            )
        return compose("compare", words, folders).node, (None, None)
    option, given, state = _named(name)
    extra = [f"reward={option}", *(f"reward.{word}" for word in own)]
    node = compose("compare", [*words, *extra], folders, given).node
    return node, (node["reward"], state)


def design(args: argparse.Namespace) -> None:
    from embodied.reward_design import settings

    if args.own["resume"] is not None:
        node, own = settings.resumed(Path(args.own["resume"]), [*args.names, *args.words])
    else:
        node, own = settings.fresh(args.names, args.own["learn"], args.words, args.config_dir)
    from embodied.reward_design.run import DesignConfig, save
    from embodied.reward_design.run import design as search

    config: DesignConfig = parse(DesignConfig, node, "design")
    require_at_least(node, {"tried": 256})
    folder = Path(config.out)
    save(node, own, folder)
    for name, value in settings.facts(node, own).items():
        print(f"{name:>8}  {value}", flush=True)
    try:
        search(config, own, lambda line: print(line, flush=True))
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"resume with: embodied reward design resume={folder}") from stop
    print(f"  report    {folder / 'report.md'}\n  program   {folder / 'best.py'}")
    print(
        f"next: embodied train {' '.join(own)} ... reward=program reward.file={folder / 'best.py'}"
    )
