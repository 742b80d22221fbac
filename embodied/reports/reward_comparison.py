"""Compares two rewards on the same episodes of several policies: distances, ranks, plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import Node, build
from embodied.core.checkpoint import load_policy
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.reward import Reward
from embodied.core.tensors import Tensors
from embodied.datasets.collect import play
from embodied.nn import statistics
from embodied.reports.datasets import evaluate_reward, make_reward, rows_of
from embodied.reports.terminal import print_rows
from embodied.rewards.analysis import distances
from embodied.rewards.wrappers.added_observations import augment_shared


@dataclass(frozen=True)
class PolicyEpisodes:
    """`rows` are transitions, episode after episode; `episode` [N] (int64) is the episode index of
    each; `success` [E] (bool) is None if the environment does not report it; `policy` [E] (int64)
    is the index of the policy."""

    rows: Tensors
    episode: Tensor
    success: Tensor | None
    policy: Tensor

    def __len__(self) -> int:
        return len(self.policy)

    def split(self, values: Tensor) -> list[Tensor]:
        """Values [N] of the transitions, by episode."""
        return list(values.split(self.episode.bincount(minlength=len(self)).tolist()))


@torch.no_grad()
def collect_episodes(
    env: VecEnv, policies: Sequence[Policy], episodes: int, gamma: float, seed: int
) -> PolicyEpisodes:
    """At least `episodes` episodes of each policy, the same number from every parallel env."""
    count = -(-episodes // env.num_envs) * env.num_envs
    played = [
        (number, episode)
        for number, policy in enumerate(policies)
        for episode, _ in islice(play(policy.eval(), env, seed + number), count)
    ]
    kept = [rows_of(episode, gamma) for _, episode in played]
    won = torch.stack([episode["success"].any() for _, episode in played]).cpu()
    episode = torch.arange(len(kept)).repeat_interleave(torch.tensor([*map(tt.length, kept)]))
    # An environment that never says success need not know it.
    success = won if won.any() else None
    return PolicyEpisodes(tt.cat(kept), episode, success, torch.tensor([n for n, _ in played]))


Numbers = NDArray[np.float64]
Index = NDArray[np.int64]
FITTED = 4096  # transitions that values are fitted on
SLACK = 1e-6


def compare_in(
    env: VecEnv, settings: Node, chosen: Sequence[tuple[Node | None, Any]]
) -> dict[str, Any]:
    """All measures by name, with the episodes of `env` they were computed on; `chosen`: the node
    (None: the environment's reward) and the state of each reward."""
    spec, gamma, seed = env.spec, settings["gamma"], settings["seed"]
    policies = players(settings, env)
    rewards: list[Reward | None] = []
    for letter, (node, state) in zip("AB", chosen, strict=True):
        reward = None
        if node is not None:
            reward = make_reward(node, state, spec, gamma, env.num_envs, seed)
            env = augment_shared(env, reward, f"reward {letter}")
        rewards.append(reward)
    cover = collect_episodes(env, list(policies.values()), settings["episodes"], gamma, seed)
    return {
        "env": settings["env"],
        "rewards": [node or "own" for node, _ in chosen],
        "policies": list(policies),
        **compare(cover, rewards, gamma, settings["epic_rows"], settings["epic_means"]),
    }


def players(settings: Node, env: VecEnv) -> dict[str, Policy]:
    """The policies whose episodes are used, by name."""
    wanted, run = settings["policy"], settings["run"]
    if wanted not in ("random", "mixture"):
        return {wanted: load_policy(wanted, env.spec)}
    nodes = {"random": {"_target_": "embodied.policies.random.Random"}}
    if wanted == "mixture" and settings["demonstrator"] is not None:
        nodes["demonstrator"] = settings["demonstrator"]
    made: dict[str, Policy] = {k: build(node, Policy, spec=env.spec) for k, node in nodes.items()}
    if wanted == "mixture" and run is not None:
        made[run] = load_policy(run, env.spec)
    return made


def compare(
    cover: PolicyEpisodes, rewards: Sequence[Reward | None], gamma: float, rows: int, means: int
) -> dict[str, Any]:
    """All measures by name: a number, or a dict of `value`, `low` and `high`; `values` are the
    rewards of every step, by episode."""
    values = [evaluate_reward(reward, cover.rows) for reward in rewards]
    each = [[part.double().numpy() for part in cover.split(value)] for value in values]
    epic = None
    if rows:
        asked = [lambda some, reward=reward: evaluate_reward(reward, some) for reward in rewards]
        some = tt.take(cover.rows, _spread(tt.length(cover.rows), rows))
        epic = float(distances.sampled_epic(asked, some, gamma, min(means, rows))[0, 1])
    index = _spread(tt.length(cover.rows), FITTED)
    some = tt.take(cover.rows, index)
    states = features(some)
    known = [lambda some, value=value: value[index] for value in values]
    half = distances.sampled_starc(known, some, states, ridge=1e-4)[0, 1]
    pearson = distances.sampled_starc(known, some, states, ridge=1e-4, measure="pearson")[0, 1]
    inside = distances.within(each[0], each[1])
    one, other = (np.array([part.sum() for part in parts]) for parts in each)
    return {
        "episodes": len(cover),
        "rows": len(cover.episode),
        "successes": None if cover.success is None else int(cover.success.sum()),
        "epic": epic,
        "starc": float(half),
        "starc_pearson": float(pearson),
        "rank_within": _with_interval(lambda i: float(inside[i].mean()), len(inside)),
        "rank_returns": _with_interval(lambda i: statistics.spearman(one[i], other[i]), len(one)),
        **_alone("a", each[0], cover),
        **_alone("b", each[1], cover),
        "values": [[part.tolist() for part in parts] for parts in each],
        "success": None if cover.success is None else cover.success.tolist(),
    }


def features(rows: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of the observations before and after each transition (images average-pooled)."""
    now, then = (_numbers(tt.under(rows, end)) for end in ("obs", "next_obs"))
    mean, std = now.mean(0), now.std(0).clamp(min=1e-6)
    used = now.std(0) > 1e-6
    both = [((part - mean) / std)[:, used].clamp(-5, 5) for part in (now, then)]
    return distances.fourier(both[0]), distances.fourier(both[1])


def _numbers(obs: Tensors) -> torch.Tensor:
    parts = []
    for name in sorted(obs):
        value = obs[name].float()
        if obs[name].dtype == torch.uint8 and value.ndim == 4 and value.shape[-1] == 3:
            value = torch.nn.functional.adaptive_avg_pool2d(value.permute(0, 3, 1, 2), 4)
        parts.append(value.reshape(len(value), -1))
    return torch.cat(parts, 1)


def _alone(name: str, parts: Sequence[Numbers], cover: PolicyEpisodes) -> dict[str, Any]:
    sums, last = np.array([p.sum() for p in parts]), np.array([p[-1] for p in parts])
    facts: dict[str, Any] = {
        f"{name}_mean": float(np.concatenate(list(parts)).mean()),
        f"{name}_falls": float(np.mean([distances.violations(p, SLACK) for p in parts])),
        f"{name}_plateau": float(np.mean([distances.plateau(p) for p in parts])),
    }
    if cover.success is None:
        return facts
    won = cover.success.numpy()
    return facts | {
        f"{name}_{key}": _with_interval(lambda i, s=score: statistics.auc(s[i], won[i]), len(won))
        for key, score in {"auc_last": last, "auc_return": sums}.items()
    }


def _with_interval(statistic: Callable[[Index], float], count: int) -> dict[str, float]:
    if not count:
        return {"value": float("nan"), "low": float("nan"), "high": float("nan")}
    low, high = distances.interval(statistic, count, samples=500)
    return {"value": statistic(np.arange(count)), "low": low, "high": high}


def _spread(total: int, count: int) -> torch.Tensor:
    return torch.linspace(0, total - 1, min(total, count)).long()


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


def show(facts: dict[str, Any], names: Sequence[str]) -> None:
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


def draw(facts: dict[str, Any], names: Sequence[str], file: Path) -> None:
    """Left: the returns under both rewards, by success. Right: both rewards over the episode with
    the highest return under the first, each scaled to [0, 1]."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    sums = np.array([[sum(part) for part in parts] for parts in facts["values"]])
    won = np.array(facts["success"] or [False] * sums.shape[1], bool)
    for kind, mark, label in ((~won, "x", "failed"), (won, "o", "succeeded")):
        left.scatter(sums[0, kind], sums[1, kind], marker=mark, label=label, alpha=0.7)
    left.set(xlabel=f"sum of A ({names[0]})", ylabel=f"sum of B ({names[1]})", title="episodes")
    if facts["success"] is not None:
        left.legend()
    best = int(sums[0].argmax())
    for letter, name, parts in zip("AB", names, facts["values"], strict=True):
        series = np.array(parts[best])
        right.plot((series - series.min()) / max(np.ptp(series), 1e-12), label=f"{letter} ({name})")
    right.set(xlabel="step", ylabel="reward (scaled to [0, 1])", title=f"episode {best}")
    right.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
