"""Rewards: label, score and compare with them, fit them to recorded episodes, design programs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.progress import Progress as Bar

from embodied.commands import (
    print_rows,
    require_at_least,
    split_words,
    take,
    yaml_values,
)
from embodied.compose import allow_from, compose, option, options, search_folders
from embodied.core.atomic_write import write_json
from embodied.core.build import ConfigError, Node, build, nearest, parse, shell_words
from embodied.core.saved_node import read_saved, require_inside
from embodied.datasets.hub import local_folder


def label_command(args: argparse.Namespace) -> None:
    sources, words = split_words(args.words)
    name, words = take(words, "reward")
    out, words = take(words, "out")
    if len(sources) != 1 or name is None or out is None:
        raise ConfigError("no dataset: embodied reward label DATASET reward=NAME out=DIR")

    from embodied.datasets.lerobot.reader import read_episodes
    from embodied.reports.datasets import label, means

    settings, state, origin = chosen(name, words, args.config_dir, "label")
    try:
        with Bar() as bar:
            task = bar.add_task("episodes", total=None)
            about = label(
                Path(sources[0]),
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
    shown = ", ".join(f"{key} {value:.4g}" for key, value in means(episodes).items())
    print(f"{out}: {len(episodes)} episodes, {shown}, reward {about['hash'][:12]}")
    print(f"next: embodied train experiment=NAME demos={out}")


def chosen(
    name: str, words: list[str], folders: list[str], command: str
) -> tuple[Node, Any, str | None]:
    """Settings of `command` with the reward's node, its state, and the hash of the state's
    source."""
    from embodied.core import checkpoint
    from embodied.reports.datasets import of_run

    given: dict[str, Node] = {}
    state, origin = None, None
    if Path(name).is_dir():
        node, state = of_run(Path(name))
        origin = checkpoint.file_hash(checkpoint.find(name) / "loop.pt") if state else None
        given, name = {"reward/saved": node}, "saved"
    settings = compose(command, [f"reward={name}", *words], folders, given).node
    require_at_least(settings, {"gamma": 0})
    return settings, state, origin


SCORE_LEAST = {"episodes": 1, "gamma": 0, "seed": 0, "threads": 1}
COLUMNS = ("first", "last", "lowest", "highest", "mean", "sum", "rise")
AREAS = {
    "last": "the last step's reward",
    "mean": "the mean reward",
    "sum": "the sum",
    "length": "the length alone (shorter is better), a control of the sum",
}


def score_command(args: argparse.Namespace) -> None:
    sources, words = split_words(args.words)
    name, words = take(words, "reward")
    if len(sources) != 1 or name is None:
        raise ConfigError("no dataset: embodied reward score DATASET reward=NAME")
    import torch

    from embodied.datasets.lerobot.reader import read_episodes
    from embodied.reports import datasets as scoring

    settings, state, origin = chosen(name, words, args.config_dir, "score")
    require_at_least(settings, SCORE_LEAST)
    torch.set_num_threads(settings["threads"])
    source = local_folder(sources[0])
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
        show_scores(rows, facts)
        print(f"{folder}/score.json  {folder}/score.png")
    for line in scoring.between_cameras(found):
        print(line)


def _rows(episodes: Any, settings: Node, state: Any, out: Path) -> list[dict[str, Any]]:
    from embodied.reports.datasets import make_reward, require_ready, score

    node, gamma = settings["reward"], settings["gamma"]
    reward = make_reward(node, state, episodes.spec, gamma, 1, settings["seed"], out)
    if state is None and node.get("trained") is None:
        require_ready(reward, "score")
    with Bar() as bar:
        task = bar.add_task("episodes", total=len(episodes))
        return score(episodes, reward, gamma, lambda done, _: bar.update(task, completed=done))


def show_scores(rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> None:
    lines: list[list[str]] = []
    for row in rows:
        numbers = ("-" if row[key] is None else f"{row[key]:.3f}" for key in COLUMNS)
        won = {True: "yes", False: "no", None: "-"}[row["success"]]
        lines.append([str(row["episode"]), str(row["steps"]), *numbers, won])
    print_rows(("episode", "steps", *COLUMNS, "success"), lines)
    print(
        f"{facts['episodes']} episodes, {facts['steps']:,} steps; mean rise {_text(facts['rise'])}"
    )
    if "successes" not in facts:
        print("success is not recorded: no success AUC")
        return
    print(f"{facts['successes']} successes, {facts['failures']} failures; success AUC of")
    for key, words in AREAS.items():
        found = facts[f"auc_{key}"]
        interval = f" [{found['low']:.3f}, {found['high']:.3f}]" if found else ""
        print(f"  {words}: {_text(found and found['value'])}{interval}")
    if "confusion" in facts:
        counts = ", ".join(f"{count} {what}" for what, count in facts["confusion"].items())
        print(f"last reward >= {facts['threshold']:g}: {counts}")
        for what, numbers in facts["mistaken"].items():
            if numbers:
                print(f"  {what}: episodes {', '.join(map(str, numbers))}")


def _text(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"


def classifier_command(args: argparse.Namespace) -> None:
    import torch

    from embodied.rewards.success.model import Training, load_labelled, made, mark_of, write

    folders, words = split_words(args.words)
    given = yaml_values(words)
    out, seed = given.pop("out", None), int(given.pop("seed", 0))
    if not folders or out is None:
        raise ConfigError("no dataset or no out=DIR: embodied reward classifier DATASET... out=DIR")
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


def preferences_command(args: argparse.Namespace) -> None:
    folders, words = split_words(args.words)
    if not folders:
        raise ConfigError("no dataset: embodied reward preferences DATASET... reward=NAME out=DIR")
    node = compose("preferences", words, args.config_dir).node
    require_at_least(node, {"seed": 0, "threads": 1})
    if not 0 < node["held_out"] < 1:
        raise ConfigError(f"held_out={node['held_out']} must be between 0 and 1")
    import torch

    from embodied.reports.datasets import label_by_preferences, read_joined

    out = Path(node["out"])
    if (out / "meta").exists():
        raise ConfigError(f"{out} already contains a dataset; choose another folder: out=DIR")
    torch.set_num_threads(node["threads"])
    episodes = read_joined([Path(folder) for folder in folders])
    print(f"{', '.join(folders)}: {len(episodes)} episodes; labelling pairs", flush=True)
    _print_report(out, label_by_preferences(node, episodes))


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


COMPARE_LEAST = {
    "episodes": 1,
    "num_envs": 1,
    "seed": 0,
    "epic_rows": 0,
    "epic_means": 1,
    "threads": 1,
}
LINES = {
    "epic": "EPIC distance (sampled)",
    "starc": "STARC distance (half L2, real transitions)",
    "starc_pearson": "STARC distance (Pearson)",
    "rank_within": "rank correlation of steps, within episodes",
    "rank_returns": "rank correlation of episodes' sums",
    "a_auc_last": "A: last step's reward against success (AUC)",
    "b_auc_last": "B: last step's reward against success (AUC)",
    "a_auc_return": "A: episode's return against success (AUC)",
    "b_auc_return": "B: episode's return against success (AUC)",
    "a_plateau": "A: share of steps that hardly change",
    "b_plateau": "B: share of steps that hardly change",
    "a_falls": "A: share of steps that fall",
    "b_falls": "B: share of steps that fall",
}


def compare_command(args: argparse.Namespace) -> None:
    names, words = split_words(args.words)
    wanted, words = take(words, "policy")
    if len(names) != 2:
        raise ConfigError(
            "two rewards are needed: embodied reward compare A B env=NAME (own: the environment's)"
        )
    plain = with_demonstrator([w for w in words if w[:2] not in ("a.", "b.")], args.config_dir)
    chosen = [
        choose(name, plain, [w[2:] for w in words if w.startswith(f"{letter}.")], args.config_dir)
        for letter, name in zip("ab", names, strict=True)
    ]
    settings = {**chosen[0][0], "policy": wanted or "mixture"}
    require_at_least(settings, COMPARE_LEAST)
    import torch

    from embodied.core.env import VecEnv
    from embodied.reports.reward_comparison import compare_in, draw

    torch.set_num_threads(settings["threads"])
    env = build(settings["env"] | {"num_envs": settings["num_envs"]}, VecEnv)
    try:
        facts = compare_in(env, settings, [each[1] for each in chosen])
    finally:
        env.close()
    show_comparison(facts, names)
    labels = [Path(name).stem for name in names]
    folder = Path(settings["out"] or f"outputs/compare-{'-'.join(labels)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.json").write_text(json.dumps(facts, indent=1))
    draw(facts, labels, folder / "compare.png")
    print(f"{folder}/compare.json  {folder}/compare.png")


def with_demonstrator(words: Sequence[str], folders: Sequence[str]) -> list[str]:
    """`words`, plus the demonstrator of the environment or of its task, if one exists."""
    if any(word.startswith("demonstrator=") for word in words):
        return list(words)
    search = search_folders(folders)
    env = next((word.partition("=")[2] for word in words if word.startswith("env=")), "")
    file, known = options("env", search).get(env), options("demonstrator", search)
    task = str(option(file).get("task")) if file else ""
    found = [name for name in (env, task) if name in known]
    return [*words, *(f"demonstrator={name}" for name in found[:1])]


def choose(
    name: str, words: Sequence[str], own: Sequence[str], folders: Sequence[str]
) -> tuple[Node, tuple[Node | None, Any]]:
    """Settings of the comparison, and one reward: its node (None: the environment's) and its state
    (None: untrained)."""
    path, state = Path(name), None
    given: dict[str, Node] = {}
    if name == "own":
        if own:
            raise ConfigError(
                f"the environment's reward has no setting {own[0]} here; set env.KEY=VALUE"
            )
        return compose("compare", words, folders).node, (None, None)
    if path.is_dir():
        from embodied.reports.datasets import of_run

        node, state = of_run(path)
        given, name = {"reward/saved": node}, "saved"
    elif path.suffix == ".yaml" and path.exists():
        given, name = {"reward/given": read_saved(path)}, "given"
    extra = [f"reward={name}", *(f"reward.{word}" for word in own)]
    node = compose("compare", [*words, *extra], folders, given).node
    return node, (node["reward"], state)


def show_comparison(facts: dict[str, Any], names: Sequence[str]) -> None:
    won = "" if facts["successes"] is None else f", {facts['successes']} succeeded"
    print(
        f"A {names[0]}, B {names[1]}: {facts['rows']:,} steps of {facts['episodes']} episodes{won}"
    )
    print(f"policies: {', '.join(facts['policies'])}")
    rows: list[tuple[str, str, str]] = []
    for key, words in LINES.items():
        value = facts.get(key)
        if isinstance(value, dict):
            between = f"[{value['low']:.3f}, {value['high']:.3f}]"
            rows.append((words, f"{value['value']:.3f}", between))
        elif value is not None:
            rows.append((words, f"{value:.3f}", ""))
    print_rows(("measure", "value", "95% interval"), rows)


def design_command(args: argparse.Namespace) -> None:
    resume, words = take(args.words, "resume")
    if resume is not None:
        node, own = _resumed(Path(resume), words)
    else:
        node, own = _fresh(words, args.config_dir)
    from embodied.reward_design.run import DesignConfig, design, save

    config: DesignConfig = parse(DesignConfig, node, "design")
    require_at_least(node, {"tried": 256})
    folder = Path(config.out)
    save(node, own, folder)
    for name, value in _facts(node, own).items():
        print(f"{name:>8}  {value}", flush=True)
    try:
        design(config, own, lambda line: print(line, flush=True))
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"resume with: embodied reward design resume={folder}") from stop
    print(f"  report    {folder / 'report.md'}\n  program   {folder / 'best.py'}")
    print(
        f"next: embodied train {' '.join(own)} ... reward=program reward.file={folder / 'best.py'}"
    )


def _fresh(words: list[str], folders: list[str]) -> tuple[Node, list[str]]:
    """The settings, and the words that select the environment for training."""
    learn, words = take(words, "learn")
    said = [word for word in words if "=" not in word]
    if len(said) > 1:
        raise ConfigError(f'the task must be one quoted sentence; found "{said[1]}" after it')
    made = compose("design", [word for word in words if word not in said], folders)
    node, choices = made.node, made.choices
    if learn is not None:
        node["learn"] = shell_words(learn, "learn")
    if said:
        node["sentence"] = said[0]
    node["sentence"] = node["sentence"] or node["env"].get("text")
    if not node["sentence"]:
        from embodied.core.env import VecEnv

        env = build(node["env"] | {"num_envs": 1}, VecEnv)
        env.close()
        node["sentence"] = env.spec.text
    marks = [choices.get("env"), choices.get("designer"), str(node["seed"])]
    name = "-".join(str(mark) for mark in marks)
    node["out"] = str(node["out"] or Path("outputs") / f"design-{name}")
    if (Path(node["out"]) / "design.jsonl").exists():
        raise ConfigError(
            f"{node['out']} already contains a design: resume={node['out']}, or out=DIR"
        )
    return node, [word for word in words if word.split("=")[0].split(".")[0] in ("env", "allow")]


def _resumed(folder: Path, words: list[str]) -> tuple[Node, list[str]]:
    if changed := [word for word in words if not word.startswith("allow=")]:
        raise ConfigError(f"settings cannot change on resume; omit {changed[0]}")
    file = folder / "design.yaml"
    if not file.exists():
        raise ConfigError(f"no design found in {folder}")
    saved = read_saved(file)
    allow_from(words)
    require_inside(saved["config"], file)
    for word in [*saved["words"], *saved["config"].get("learn", [])]:
        if str(word).lstrip("+").startswith(("-", "allow")) and word not in words:
            raise ConfigError(f'{file} holds {word}; if you trust it, add "{word}"')
    return saved["config"], saved["words"]


def _facts(node: Node, words: list[str]) -> dict[str, str]:
    budget = node["budget"]
    chat = node.get("chat")
    return {
        "task": node["sentence"],
        "env": " ".join(words),
        "designer": str(node["designer"]["_target_"]).rpartition(".")[2],
        "chat": "none" if chat is None else str(chat.get("model") or chat.get("cache")),
        "budget": f"{node['rounds']} rounds of {node['samples']} programs, {budget['steps']:,} "
        f"steps each, {budget['workers']} in parallel",
        "folder": node["out"],
    }
