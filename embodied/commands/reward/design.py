"""Design a reward program for a task described in words, by search with training runs."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from embodied.commands import require_at_least, take
from embodied.core.build import ConfigError, Node
from embodied.core.saved_node import read_saved, require_inside


def run(args: argparse.Namespace) -> None:
    resume, words = take(args.words, "resume")
    if resume is not None:
        node, own = _resumed(Path(resume), words)
    else:
        node, own = _fresh(words, args.config_dir)

    from embodied.core.build import parse
    from embodied.reward_design.run import DesignConfig, design, save

    config: DesignConfig = parse(DesignConfig, node, "design")
    require_at_least(node, LEAST)
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


LEAST = {
    "rounds": 1,
    "samples": 1,
    "finals": 0,
    "seed": 0,
    "tried": 256,
    "budget.steps": 1,
    "budget.eval_every": 1,
    "budget.workers": 1,
}


def _fresh(words: list[str], folders: list[str]) -> tuple[Node, list[str]]:
    """The settings, and the words that select the environment for training."""
    from embodied.compose import compose

    learn, words = take(words, "learn")
    said = [word for word in words if "=" not in word]
    if len(said) > 1:
        raise ConfigError(f'the task must be one quoted sentence; found "{said[1]}" after it')
    made = compose("design", [word for word in words if word not in said], folders)
    node, choices = made.node, made.choices
    if learn is not None:
        node["learn"] = shlex.split(learn)
    if said:
        node["sentence"] = said[0]
    node["sentence"] = node["sentence"] or node["env"].get("text") or _own_sentence(node["env"])
    marks = [choices.get("env"), choices.get("designer"), str(node["seed"])]
    name = "-".join(str(mark) for mark in marks)
    node["out"] = str(node["out"] or Path("outputs") / f"design-{name}")
    if (Path(node["out"]) / "design.jsonl").exists():
        raise ConfigError(
            f"{node['out']} already contains a design: resume={node['out']}, or out=DIR"
        )
    return node, [word for word in words if word.split("=")[0].split(".")[0] in ("env", "allow")]


def _own_sentence(env: Node) -> str:
    from embodied.core.build import build
    from embodied.core.env import VecEnv

    made = build(env | {"num_envs": 1}, VecEnv)
    made.close()
    return made.spec.text


def _resumed(folder: Path, words: list[str]) -> tuple[Node, list[str]]:
    from embodied.compose import allow_from

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
