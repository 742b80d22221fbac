"""Rewards outside of a run: load one, score recorded episodes with it, relabel a dataset with it.

A relabelled dataset has the labels as `reward` and the recorded rewards as `recorded_reward`; the
provenance is in `reward.yaml` and in each episode. The source dataset is not changed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor

from embodied.core import checkpoint
from embodied.core import tensors as tt
from embodied.core.atomic_write import write_json
from embodied.core.build import ConfigError, Node, build
from embodied.core.checkpoint import git_revision
from embodied.core.device import seed_everything
from embodied.core.reward import AsksAboutEpisodes, AugmentsEpisodes, Reward, Stateful
from embodied.core.saved_node import read_run_settings, read_saved, require_inside
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import DatasetError, Episodes, EpisodeWriter, read_episodes
from embodied.datasets.transitions import observations, transitions
from embodied.llm.chat import ServerUnusable
from embodied.nn.statistics import auc, spearman
from embodied.reports.terminal import print_rows
from embodied.rewards.analysis import distances

CHUNK = 2048  # transitions per call


def make_reward(
    node: Node,
    state: Any,
    spec: Spec,
    gamma: float,
    num_envs: int = 1,
    seed: int = 0,
    folder: Path = Path("outputs") / "reward",
) -> Reward:
    """Build the reward of `node`, with a saved `state` if there is one (None: untrained). It may
    write to `folder`."""
    context = {"device": torch.device("cpu"), "seed": seed, "folder": folder}
    reward: Reward = build(node, Reward, spec=spec, gamma=gamma, num_envs=num_envs, **context)
    if state is not None and isinstance(reward, Stateful):
        reward.set_state(state)
    return reward


def require_ready(reward: Reward, verb: str) -> None:
    """ConfigError if an untrained `reward` says nothing yet: it learns during training, and is not
    one that looks at recorded episodes by itself."""
    if not reward.frozen and not isinstance(reward, AugmentsEpisodes):
        raise ConfigError(
            f"this reward is learned during training; {verb} with the reward of a run (reward=RUN)"
        )


def of_run(path: Path) -> tuple[Node, Any]:
    saved = checkpoint.find(path)
    file = saved.parent.parent / "run.yaml"
    node = read_run_settings(file).get("reward")
    if node is None:
        raise ConfigError(f"{path} was trained with the environment's reward; use reward=own")
    require_inside(node, file)
    return node, checkpoint.load_state(saved, "loop")["loop"]["reward"]


@torch.no_grad()
def evaluate_reward(reward: Reward | None, rows: Tensors) -> Tensor:
    """Rewards [N] (float32) of transitions, in batches; None: the environment's reward. ConfigError
    if the reward needs a key that the transitions do not have."""
    if reward is None:
        return rows["reward"].float()
    total = tt.length(rows)
    parts: list[Tensor] = []
    for begin in range(0, total, CHUNK):
        some = tt.each(rows, lambda value, begin=begin: value[begin : begin + CHUNK])
        try:
            parts.append(reward(some).float())
        except KeyError as error:
            raise ConfigError(
                f"the reward reads {error.args[0]}, which these transitions do not have "
                f"(they have {', '.join(sorted(rows))})"
            ) from error
    return torch.cat(parts)


FILE = "reward.yaml"
RECORDED = "recorded_reward"
ANSWERED = "answered"
UNANSWERED = (
    "the model answered about none of {count} episodes, so nothing is labelled; why is said above: "
    "check reward.chat"
)


def label_dataset(
    source: Path,
    out: Path,
    node: Node,
    state: Any,
    origin: str | None,
    gamma: float,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Write `source` with the rewards of `node` to `out`, episode by episode; continues an
    interrupted call with the same reward.

    `origin` is the hash of the checkpoint that `state` was loaded from. `progress(done, all)` is
    called after each episode. An episode about which a model gave no answer has ANSWERED false in
    its description. Returns the provenance; ConfigError if no episode was answered.
    """
    episodes = read_episodes(source)
    reward = make_reward(node, state, episodes.spec, gamma)
    if state is None:
        require_ready(reward, "label")
    about = provenance(source, node, origin, gamma)
    _require_same(out, about)
    with EpisodeWriter.like(source, out, episodes.spec) as writer:
        for number in range(len(writer), len(episodes)):
            episode = episodes.episode(number)
            known = dict(episodes.info[number]) if episodes.info else {}
            rewards, answered = labels(reward, episode, gamma)
            known |= {"reward": about["hash"]} | ({} if answered else {ANSWERED: False})
            kept = {RECORDED: episode["reward"], **episode, "reward": rewards}
            writer.add(kept, episodes.text(number), known)
            progress(number + 1, len(episodes))
    if not answered_episodes(read_episodes(out)):
        shutil.rmtree(out)
        raise ConfigError(UNANSWERED.format(count=len(episodes)))
    return about


def answered_episodes(episodes: Episodes) -> int:
    """Number of labelled episodes but for those without an answer of a model."""
    return len(episodes) - sum(known.get(ANSWERED) is False for known in episodes.info or ())


def labels(reward: Reward, episode: Tensors, gamma: float) -> tuple[Tensor, bool]:
    """Rewards [T] of an episode as `Episodes.episode` gives it, and whether the model that the
    reward asks about it answered (true if it asks none)."""
    asks = reward if isinstance(reward, AsksAboutEpisodes) else None
    before = asks.unanswered if asks else 0
    try:
        rewards = evaluate_reward(reward, rows_of(augmented(reward, episode), gamma)).cpu()
        return rewards, asks is None or asks.unanswered == before
    except ServerUnusable:
        raise
    except ConfigError as error:
        raise ConfigError(
            f"{error}; record it (demos collect with that observation, such as env.cameras), or "
            "configure the reward for one that is recorded (reward.KEY=...)"
        ) from error


def augmented(reward: Reward, episode: Tensors) -> Tensors:
    if not isinstance(reward, AugmentsEpisodes):
        return episode
    added = reward.augment_episode(observations(episode))
    before = tt.each(added, lambda value: value[:-1])
    last = tt.each(added, lambda value: value[-1])
    return {**episode, **tt.nest(before, "obs"), **tt.nest(last, "next_obs")}


def rows_of(episode: Tensors, gamma: float) -> Tensors:
    obs = tt.under(episode, "obs")
    last = tt.under(episode, "next_obs")
    after = {name: torch.cat([value[1:], last[name][None]]) for name, value in obs.items()}
    return {
        **tt.nest(obs, "obs"),
        "action": episode["action"],
        "reward": episode["reward"],
        "discount": gamma * (~episode["terminated"]).float(),
        **tt.nest(after, "next_obs"),
    }


def provenance(source: Path, node: Node, origin: str | None, gamma: float) -> dict[str, Any]:
    """The origin of the labels; `hash` identifies reward, settings, weights and discount
    together."""
    what = {"node": node, "weights": origin, "gamma": gamma}
    return {
        **what,
        "hash": hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest(),
        "dataset": str(source.resolve()),
        "version": version("embodied-rl"),
        "git": git_revision(),
    }


def _require_same(out: Path, about: dict[str, Any]) -> None:
    """DatasetError unless `out` is new or has labels of the same reward on the same dataset."""
    file = out / FILE
    if file.exists():
        there = read_saved(file)
        if any(there.get(key) != about[key] for key in ("hash", "dataset")):
            raise DatasetError(
                f"{out} contains labels of another reward or dataset; give another out=DIR"
            )
        return
    if (out / "meta").exists():
        raise DatasetError(f"{out} contains another dataset; give another folder: out=DIR")
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(about, sort_keys=False))


@runtime_checkable
class Teachable(Protocol):
    """A reward that can be fitted to a dataset by labelling pairs of it."""

    def fit_from(self, episodes: Episodes, held_out: float = 0.2) -> dict[str, float]: ...


def label_by_preferences(node: Node, episodes: Episodes, source: Path) -> dict[str, float]:
    """Fit the reward of `node` to pairs of `episodes`, and write them to OUT with its rewards, as
    the dataset `source` keeps them; the environment's are kept as `env_reward`. Returns metrics of
    held-out episodes, which are also written to OUT/preferences.json."""
    out, gamma = Path(node["out"]), 0.99
    seed_everything(node["seed"])
    reward = make_reward(
        node["reward"], None, episodes.spec, gamma, 1, node["seed"], out / "reward"
    )
    if not isinstance(reward, Teachable):
        raise ConfigError(f"{node['reward']['_target_']} cannot be fitted to pairs of a dataset")
    report = reward.fit_from(episodes, node["held_out"])
    rewards = evaluate_reward(reward, transitions(episodes, gamma))
    with EpisodeWriter.like(source, out, episodes.spec) as writer:
        for number, own in enumerate(rewards.split(episodes.length.tolist())):
            episode = episodes.episode(number)
            info = dict(episodes.info[number]) if episodes.info else {}
            kept = {**episode, "env_reward": episode["reward"], "reward": own}
            writer.add(kept, episodes.text(number), info)
    known = {name: value for name, value in report.items() if np.isfinite(value)}
    write_json(out / "preferences.json", {"reward": node["reward"], "seed": node["seed"], **known})
    return report


Numbers = NDArray[np.float64]
Row = dict[str, Any]


def score(
    episodes: Episodes, reward: Reward, gamma: float, progress: Callable[[int, int], None]
) -> list[Row]:
    """One row per episode that was answered, if the reward asks a model: `values` [T], the reward
    of each step, with their statistics, and `success` (None: not recorded). ConfigError if the
    reward is not finite, or no episode was answered.

    `rise` is Spearman's correlation of the reward with the step number (None: it is constant).
    `progress(done, all)` is called after each episode.
    """
    rows: list[Row] = []
    for number in range(len(episodes)):
        episode = episodes.episode(number)
        rewards, answered = labels(reward, episode, gamma)
        progress(number + 1, len(episodes))
        if not answered:
            continue
        values = rewards.double().numpy()
        if not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ConfigError(f"the reward of step {at} of episode {number} is {values[at]}")
        success = bool(episode["success"][-1]) if "success" in episode else None
        rise = spearman(values, np.arange(len(values)))
        rows.append(
            {
                "episode": number,
                "steps": len(values),
                "first": float(values[0]),
                "last": float(values[-1]),
                "lowest": float(values.min()),
                "highest": float(values.max()),
                "mean": float(values.mean()),
                "sum": float(values.sum()),
                "rise": rise if np.isfinite(rise) else None,
                "values": values.tolist(),
                "success": success,
            }
        )
    if not rows:
        raise ConfigError(UNANSWERED.format(count=len(episodes)))
    return rows


def summary(rows: Sequence[Row], threshold: float | None) -> dict[str, Any]:
    """Means over all episodes. Where success is recorded: how well the reward tells it (areas
    under the ROC curve), how well the episode's length does so alone, and with a `threshold` of the
    last step's reward, the counts of right and wrong predictions."""
    rises = [row["rise"] for row in rows if row["rise"] is not None]
    facts: dict[str, Any] = {
        "episodes": len(rows),
        "steps": sum(row["steps"] for row in rows),
        "rise": float(np.mean(rises)) if rises else None,
        "constant": len(rows) - len(rises),
    }
    known = [row for row in rows if row["success"] is not None]
    if not known:
        return facts
    won = np.array([row["success"] for row in known])
    facts |= {"successes": int(won.sum()), "failures": int((~won).sum())}
    for name in ("last", "mean", "sum"):
        facts[f"auc_{name}"] = _with_interval(np.array([row[name] for row in known]), won)
    facts["auc_length"] = _with_interval(np.array([-row["steps"] for row in known]), won)
    if threshold is not None:
        said = np.array([row["last"] >= threshold for row in known])
        facts["threshold"] = threshold
        facts["confusion"] = {
            "true positives": int((said & won).sum()),
            "false positives": int((said & ~won).sum()),
            "false negatives": int((~said & won).sum()),
            "true negatives": int((~said & ~won).sum()),
        }
        number = np.array([row["episode"] for row in known])
        facts["mistaken"] = {
            "failures taken for successes": number[said & ~won].tolist(),
            "successes taken for failures": number[~said & won].tolist(),
        }
    return facts


def cameras(node: Node, names: Sequence[str] | None) -> dict[str, Node]:
    """The reward's `node` for each camera: an image observation by its `picture` or its only one of
    `views`; {"": node} without names."""
    if not names:
        return {"": node}
    if "views" in node:
        return {name: {**node, "views": [name]} for name in names}
    return {name: {**node, "picture": name} for name in names}


def between_cameras(found: Mapping[str, Sequence[Row]]) -> list[str]:
    """A line for each pair of cameras: the rank correlation of their rewards over all steps of the
    episodes that both have."""
    answered = [{row["episode"] for row in rows} for rows in found.values()]
    both = set.intersection(*answered)
    values = {
        name: [value for row in rows if row["episode"] in both for value in row["values"]]
        for name, rows in found.items()
    }
    return [
        f"rank correlation of {one} and {other}: {spearman(values[one], values[other]):.3f}"
        for one, other in combinations(values, 2)
    ]


def _with_interval(scores: Numbers, won: NDArray[np.bool_]) -> dict[str, float] | None:
    """The area with its bootstrap interval; None without both successes and failures."""
    if won.all() or not won.any():
        return None
    low, high = distances.interval(lambda i: auc(scores[i], won[i]), len(won), samples=500)
    return {"value": auc(scores, won), "low": low, "high": high}


COLUMNS = ("first", "last", "lowest", "highest", "mean", "sum", "rise")
AREAS = {
    "last": "the last step's reward",
    "mean": "the mean reward",
    "sum": "the sum",
    "length": "the length alone (shorter is better), a control of the sum",
}


def show(rows: Sequence[Row], facts: dict[str, Any]) -> None:
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


def draw(rows: Sequence[Row], name: str, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    look = {True: ("tab:green", "succeeded"), False: ("tab:red", "failed"), None: ("0.5", "")}
    for row in rows:
        colour, label = look[row["success"]]
        axes.plot(row["values"], color=colour, alpha=0.5, label=label or None)
    unique = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if unique:
        axes.legend(unique.values(), unique.keys())
    axes.set(xlabel="step", ylabel=f"reward ({name})")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
