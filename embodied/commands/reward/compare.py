"""Compare two rewards on episodes of one environment: distances, rank correlation, success AUC."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.commands import print_rows, require_at_least, split_words, take
from embodied.core.build import ConfigError, Node
from embodied.core.saved_node import read_saved

if TYPE_CHECKING:
    from embodied.core.env import VecEnv
    from embodied.core.policy import Policy
    from embodied.core.reward import Reward

LEAST = {"episodes": 1, "num_envs": 1, "seed": 0, "epic_rows": 0, "epic_means": 1, "threads": 1}
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


def run(args: argparse.Namespace) -> None:
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
    require_at_least(settings, LEAST)
    import torch

    from embodied.core.build import build
    from embodied.core.env import VecEnv
    from embodied.reports.reward_comparison import draw

    torch.set_num_threads(settings["threads"])
    env = build(settings["env"] | {"num_envs": settings["num_envs"]}, VecEnv)
    try:
        facts = compared(env, settings, [each[1] for each in chosen])
    finally:
        env.close()
    show(facts, names)
    labels = [Path(name).stem for name in names]
    folder = Path(settings["out"] or f"outputs/compare-{'-'.join(labels)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.json").write_text(json.dumps(facts, indent=1))
    draw(facts, labels, folder / "compare.png")
    print(f"{folder}/compare.json  {folder}/compare.png")


def with_demonstrator(words: Sequence[str], folders: Sequence[str]) -> list[str]:
    """`words`, plus the demonstrator of the environment or of its task, if one exists."""
    from embodied.compose import option, options, search_folders

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
    from embodied.compose import compose

    path, state = Path(name), None
    given: dict[str, Node] = {}
    if name == "own":
        if own:
            raise ConfigError(
                f"the environment's reward has no setting {own[0]} here; set env.KEY=VALUE"
            )
        return compose("compare", words, folders).node, (None, None)
    if path.is_dir():
        from embodied.reports.label_dataset import of_run

        node, state = of_run(path)
        given, name = {"reward/saved": node}, "saved"
    elif path.suffix == ".yaml" and path.exists():
        given, name = {"reward/given": read_saved(path)}, "given"
    extra = [f"reward={name}", *(f"reward.{word}" for word in own)]
    node = compose("compare", [*words, *extra], folders, given).node
    return node, (node["reward"], state)


def compared(
    env: VecEnv, settings: Node, chosen: Sequence[tuple[Node | None, Any]]
) -> dict[str, Any]:
    """All measures by name, with the episodes they were computed on."""
    from embodied.reports.label_dataset import make_reward
    from embodied.reports.reward_comparison import collect_episodes, compare
    from embodied.rewards.wrappers.render_caption import augment_shared

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
    counts = settings["epic_rows"], settings["epic_means"]
    return {
        "env": settings["env"],
        "rewards": [node or "own" for node, _ in chosen],
        "policies": list(policies),
        **compare(cover, rewards, gamma, *counts),
    }


def players(settings: Node, env: VecEnv) -> dict[str, Policy]:
    """The policies whose episodes are used, by name."""
    from embodied.core import checkpoint
    from embodied.core.build import build
    from embodied.core.policy import Policy

    wanted, run = settings["policy"], settings["run"]
    if wanted not in ("random", "mixture"):
        return {wanted: checkpoint.load_policy(wanted, env.spec)}
    made: dict[str, Policy] = {
        "random": build({"_target_": "embodied.policies.random.Random"}, Policy, spec=env.spec)
    }
    if wanted == "mixture" and settings["demonstrator"] is not None:
        made["demonstrator"] = build(settings["demonstrator"], Policy, spec=env.spec)
    if wanted == "mixture" and run is not None:
        made[run] = checkpoint.load_policy(run, env.spec)
    return made


def show(facts: dict[str, Any], names: Sequence[str]) -> None:
    """Print the table, one measure per line."""
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
