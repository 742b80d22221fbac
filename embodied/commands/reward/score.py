"""Score recorded episodes with a reward: a value per step, rank correlation, success AUC."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied.commands import require_at_least, require_datasets, take
from embodied.commands.reward.label import chosen
from embodied.core.build import ConfigError, Node

LEAST = {"episodes": 1, "gamma": 0, "seed": 0, "threads": 1}
COLUMNS = ("first", "last", "lowest", "highest", "mean", "sum", "rise")
AREAS = {
    "last": "the last step's reward",
    "mean": "the mean reward",
    "sum": "the sum",
    "length": "the length alone (shorter is better), a control of the sum",
}


def run(args: argparse.Namespace) -> None:
    sources = [word for word in args.words if "=" not in word]
    name, words = take([word for word in args.words if "=" in word], "reward")
    if len(sources) != 1 or name is None:
        raise ConfigError("no dataset: embodied reward score DATASET reward=NAME")
    require_datasets(sources)
    import torch

    from embodied.core.atomic_write import write_json
    from embodied.datasets.hub import local_folder
    from embodied.datasets.lerobot.reader import read_episodes
    from embodied.reports import score_dataset
    from embodied.reports.label_dataset import provenance

    settings, state, origin = chosen(name, words, args.config_dir, "score")
    require_at_least(settings, LEAST)
    torch.set_num_threads(settings["threads"])
    source = local_folder(sources[0])
    out = Path(settings["out"] or f"outputs/score-{Path(name).name}")
    episodes = read_episodes(source, settings["episodes"])
    found: dict[str, list[dict[str, Any]]] = {}
    for camera, node in score_dataset.cameras(settings["reward"], settings["cameras"]).items():
        folder, title = out / camera, f"{Path(name).name} {camera}".strip()
        rows = found[camera] = _rows(episodes, {**settings, "reward": node}, state, folder)
        facts = score_dataset.summary(rows, settings["threshold"])
        about = provenance(source, node, origin, settings["gamma"])
        folder.mkdir(parents=True, exist_ok=True)
        report = {"about": about, "summary": facts, "episodes": rows}
        write_json(folder / "score.json", report)
        score_dataset.draw(rows, title, folder / "score.png")
        print(f"{camera}:" if camera else "", end="\n" if camera else "")
        show(rows, facts)
        print(f"{folder}/score.json  {folder}/score.png")
    for line in score_dataset.between_cameras(found):
        print(line)


def _rows(episodes: Any, settings: Node, state: Any, out: Path) -> list[dict[str, Any]]:
    """The scores of all episodes, with a progress bar."""
    from rich.progress import Progress as Bar

    from embodied.reports.load_reward import make_reward, require_ready
    from embodied.reports.score_dataset import score

    node, gamma = settings["reward"], settings["gamma"]
    reward = make_reward(node, state, episodes.spec, gamma, 1, settings["seed"], out)
    if state is None and node.get("trained") is None:
        require_ready(reward, "score")
    with Bar() as bar:
        task = bar.add_task("episodes", total=len(episodes))
        return score(episodes, reward, gamma, lambda done, _: bar.update(task, completed=done))


def show(rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Print a row per episode, and the summary."""
    from rich.console import Console
    from rich.table import Table

    table = Table("episode", "steps", *COLUMNS, "success")
    for row in rows:
        numbers = ("-" if row[key] is None else f"{row[key]:.3f}" for key in COLUMNS)
        won = {True: "yes", False: "no", None: "-"}[row["success"]]
        table.add_row(str(row["episode"]), str(row["steps"]), *numbers, won)
    Console(markup=False, highlight=False).print(table)
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
