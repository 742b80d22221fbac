"""Fit a reward to labelled pairs of a dataset and write a copy with the learned rewards."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from embodied.commands import require_at_least, require_datasets
from embodied.core.build import ConfigError, Node

if TYPE_CHECKING:
    from torch import Tensor

    from embodied.core.tensors import Tensors
    from embodied.datasets.lerobot.reader import Episodes


@runtime_checkable
class Teachable(Protocol):
    """A reward that can be fitted to a dataset by labelling pairs of it."""

    def fit_from(self, episodes: Episodes, held_out: float = 0.2) -> dict[str, float]: ...

    def __call__(self, rows: Tensors) -> Tensor: ...


def run(args: argparse.Namespace) -> None:
    from embodied.compose import compose

    folders = [word for word in args.words if "=" not in word]
    if not folders:
        raise ConfigError("no dataset: embodied reward preferences DATASET... reward=NAME out=DIR")
    require_datasets(folders)
    words = [word for word in args.words if "=" in word]
    node = compose("preferences", words, args.config_dir).node
    require_at_least(node, {"seed": 0, "threads": 1})
    if not 0 < node["held_out"] < 1:
        raise ConfigError(f"held_out={node['held_out']} must be between 0 and 1")
    label_and_fit(node, [Path(folder) for folder in folders])


def label_and_fit(node: Node, folders: list[Path]) -> dict[str, float]:
    """Fit the reward, check it on held-out episodes, write the copy; returns the metrics, which are
    also written to OUT/preferences.json."""
    import torch

    from embodied.core.atomic_write import write_json
    from embodied.core.build import build
    from embodied.core.reward import Reward
    from embodied.core.seeding import seed_everything
    from embodied.core.spec import require_same
    from embodied.datasets.lerobot.reader import read_episodes
    from embodied.datasets.transitions import joined

    out = Path(node["out"])
    if (out / "meta").exists():
        raise ConfigError(f"{out} already contains a dataset; choose another folder: out=DIR")
    torch.set_num_threads(node["threads"])
    seed_everything(node["seed"])
    parts = [read_episodes(folder) for folder in folders]
    for folder, part in zip(folders[1:], parts[1:], strict=True):
        require_same(parts[0].spec, part.spec, f"dataset {folders[0]}", f"dataset {folder}")
    episodes = joined(parts)
    device, where = torch.device("cpu"), out / "reward"
    context: dict[str, Any] = {"spec": episodes.spec, "gamma": 0.99, "num_envs": 1}
    context |= {"device": device, "seed": node["seed"], "folder": where}
    reward = build(node["reward"], Reward, **context)
    if not isinstance(reward, Teachable):
        raise ConfigError(f"{node['reward']['_target_']} cannot be fitted to pairs of a dataset")
    print(f"{', '.join(map(str, folders))}: {len(episodes)} episodes; labelling pairs", flush=True)
    report = reward.fit_from(episodes, node["held_out"])
    rewards = _rewards(reward, episodes)
    _copy(out, episodes, rewards)
    known = {name: value for name, value in report.items() if not math.isnan(value)}
    write_json(out / "preferences.json", {"reward": node["reward"], "seed": node["seed"], **known})
    _print_report(out, report)
    return report


def _copy(out: Path, episodes: Episodes, rewards: Tensor) -> None:
    """The dataset with the learned reward; the environment's is kept as `env_reward`."""
    from embodied.datasets.lerobot.reader import EpisodeWriter

    with EpisodeWriter(out, episodes.spec) as writer:
        for number in range(len(episodes)):
            begin, length = int(episodes.start[number]), int(episodes.length[number])
            episode = episodes.episode(number)
            episode["env_reward"] = episode["reward"]
            episode["reward"] = rewards[begin : begin + length]
            info = dict(episodes.info[number]) if episodes.info else {}
            writer.add(episode, episodes.texts[number] if episodes.texts else None, info)


def _rewards(reward: Teachable, episodes: Episodes) -> Tensor:
    """The learned reward of every step, a thousand at a time."""
    import torch

    from embodied.core import tensors as tt
    from embodied.datasets.transitions import transitions

    rows = transitions(episodes, gamma=0.99)
    whole = torch.arange(tt.length(rows)).split(1000)
    return torch.cat([reward(tt.take(rows, some)).float() for some in whole])


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
