"""Label every step of a dataset with a reward; the recorded reward is kept as a second column."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from embodied.commands import require_at_least, require_datasets, take
from embodied.core.build import ConfigError, Node


def run(args: argparse.Namespace) -> None:
    sources = [word for word in args.words if "=" not in word]
    name, words = take([word for word in args.words if "=" in word], "reward")
    out, words = take(words, "out")
    if len(sources) != 1 or name is None or out is None:
        raise ConfigError("no dataset: embodied reward label DATASET reward=NAME out=DIR")
    require_datasets(sources)
    from rich.progress import Progress as Bar

    from embodied.datasets.lerobot.reader import read_episodes
    from embodied.reports.label_dataset import label, summary

    settings, state, origin = chosen(name, words, args.config_dir, "label")
    source = Path(sources[0])
    try:
        with Bar() as bar:
            task = bar.add_task("episodes", total=None)
            about = label(
                source,
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
    means = ", ".join(f"{key} {value:.4g}" for key, value in summary(episodes).items())
    print(f"{out}: {len(episodes)} episodes, {means}, reward {about['hash'][:12]}")
    print(f"next: embodied train experiment=NAME demos={out}")


def chosen(
    name: str, words: list[str], folders: list[str], command: str
) -> tuple[Node, Any, str | None]:
    """Settings of `command` with the reward's node, its state, and the hash of the state's
    source."""
    from embodied.compose import compose
    from embodied.core import checkpoint
    from embodied.reports.load_reward import of_run

    given: dict[str, Node] = {}
    state, origin = None, None
    if Path(name).is_dir():
        node, state = of_run(Path(name))
        origin = checkpoint.file_hash(checkpoint.find(name) / "loop.pt") if state else None
        given, name = {"reward/saved": node}, "saved"
    settings = compose(command, [f"reward={name}", *words], folders, given).node
    require_at_least(settings, {"gamma": 0})
    return settings, state, origin
