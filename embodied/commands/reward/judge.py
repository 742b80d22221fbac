"""Have pairs of a recording judged, learn the reward behind them, write a copy paid by it."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from embodied.commands import add_overrides, require_at_least
from embodied.core.build import ConfigError, Node

if TYPE_CHECKING:
    from torch import Tensor

    from embodied.core.tensors import Tensors
    from embodied.datasets.lerobot.reader import Episodes


@runtime_checkable
class Teachable(Protocol):
    """A reward that can be fitted to a recording by asking."""

    def fit_from(self, episodes: Episodes, held_out: float = 0.2) -> dict[str, float]: ...

    def __call__(self, rows: Tensors) -> Tensor: ...


def add(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser, "dataset folders, reward=NAME, out=DIR, and any setting of the reward")
    parser.epilog = (
        "examples:\n"
        "  embodied reward judge outputs/mixed reward=preference reward.leaf=state "
        "reward.labeller.error=0.15 out=outputs/judged\n"
        "  embodied reward judge outputs/mixed reward=preference_model reward.leaf=front "
        "reward.picture=front reward.labeller.goal='fold the cloth' out=outputs/judged\n"
        "  embodied train experiment=fr3_reach_iql demos=outputs/judged"
    )


def run(args: argparse.Namespace) -> None:
    from embodied.compose import compose

    folders = [word for word in args.words if "=" not in word]
    if not folders:
        raise ConfigError("what to judge: embodied reward judge DATASET... reward=NAME out=DIR")
    words = [word for word in args.words if "=" in word]
    node = compose("judge", words, args.config_dir).node
    require_at_least(node, {"seed": 0, "threads": 1})
    if not 0 < node["held_out"] < 1:
        raise ConfigError(f"held_out={node['held_out']} should be above 0 and below 1")
    judge(node, [Path(folder) for folder in folders])


def judge(node: Node, folders: list[Path]) -> dict[str, float]:
    """Fit, check, and write the labelled copy; how well it went, also in OUT/judged.json."""
    import torch

    from embodied.core.atomic_write import write_json
    from embodied.core.build import build
    from embodied.core.seeding import seed_everything
    from embodied.core.spec import require_same
    from embodied.datasets.lerobot.reader import read_episodes
    from embodied.datasets.transitions import joined

    out = Path(node["out"])
    if (out / "meta").exists():
        raise ConfigError(f"{out} holds a dataset already; name another folder: out=DIR")
    torch.set_num_threads(node["threads"])
    seed_everything(node["seed"])
    parts = [read_episodes(folder) for folder in folders]
    for folder, part in zip(folders[1:], parts[1:], strict=True):
        require_same(parts[0].spec, part.spec, f"dataset {folders[0]}", f"dataset {folder}")
    episodes = joined(parts)
    device, where = torch.device("cpu"), out / "reward"
    context: dict[str, Any] = {"spec": episodes.spec, "gamma": 0.99, "num_envs": 1}
    context |= {"device": device, "seed": node["seed"], "folder": where}
    reward = build(node["reward"], **context)
    if not isinstance(reward, Teachable):
        raise ConfigError(
            f"{node['reward']['_target_']} does not learn by asking about a recording"
        )
    print(f"{', '.join(map(str, folders))}: {len(episodes)} episodes; asking", flush=True)
    report = reward.fit_from(episodes, node["held_out"])
    paid = _paid(reward, episodes)
    _copy(out, episodes, paid)
    known = {name: value for name, value in report.items() if not math.isnan(value)}
    write_json(out / "judged.json", {"reward": node["reward"], "seed": node["seed"], **known})
    _tell(out, report)
    return report


def _copy(out: Path, episodes: Episodes, paid: Tensor) -> None:
    """The recording with another reward; the old one is `world_reward`."""
    from embodied.datasets.lerobot.reader import EpisodeWriter

    with EpisodeWriter(out, episodes.spec) as writer:
        for number in range(len(episodes)):
            begin, length = int(episodes.start[number]), int(episodes.length[number])
            episode = episodes.episode(number)
            episode["world_reward"] = episode["reward"]
            episode["reward"] = paid[begin : begin + length]
            info = dict(episodes.info[number]) if episodes.info else {}
            writer.add(episode, episodes.texts[number] if episodes.texts else None, info)


def _paid(reward: Teachable, episodes: Episodes) -> Tensor:
    """The reward of every step, a thousand at a time."""
    import torch

    from embodied.core import tensors as tt
    from embodied.datasets.transitions import transitions

    rows = transitions(episodes, gamma=0.99)
    whole = torch.arange(tt.length(rows)).split(1000)
    return torch.cat([reward(tt.take(rows, some)).float() for some in whole])


def _tell(out: Path, report: dict[str, float]) -> None:
    print(f"{out}: every step paid by {report['labels']:.0f} labels; on trajectories held out")
    lines = {
        "judged": "{:.0%} of the judge's own labels are told as well",
        "pairs": "{:.0%} in the order of the recorded reward",
        "returns": "rank correlation {:.2f} with the recorded ones",
    }
    for name, line in lines.items():  # a recording without rewards has nothing to compare with
        if not math.isnan(report[name]):
            print(f"  {name:8} {line.format(report[name])}")
    print(f"next: embodied train experiment=NAME demos={out}")
