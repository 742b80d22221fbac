"""Settings of a reward design: those of a command line, or of the folder in which it began."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from embodied.compose import allow_from, compose
from embodied.core.build import ConfigError, Node, build, shell_words
from embodied.core.saved_node import read_saved, require_inside


def fresh(
    said: Sequence[str], learn: str | None, words: Sequence[str], folders: Sequence[str]
) -> tuple[Node, list[str]]:
    """The settings of a new design, and the words that select the environment for training. `said`:
    the task in a sentence, if one is given; `learn`: words of a training, as one."""
    if len(said) > 1:
        raise ConfigError(f'the task must be one quoted sentence; found "{said[1]}" after it')
    made = compose("design", words, folders)
    node, choices = made.node, made.choices
    if learn is not None:
        node["learn"] = shell_words(learn, "learn")
    node["sentence"] = next(iter(said), None) or node["sentence"] or node["env"].get("text")
    if not node["sentence"]:
        from embodied.core.env import VecEnv

        with closing(build(node["env"] | {"num_envs": 1}, VecEnv)) as env:
            node["sentence"] = env.spec.text
    marks = [choices.get("env"), choices.get("designer"), str(node["seed"])]
    name = "-".join(str(mark) for mark in marks)
    node["out"] = str(node["out"] or Path("outputs") / f"design-{name}")
    if (Path(node["out"]) / "design.jsonl").exists():
        raise ConfigError(
            f"{node['out']} already contains a design: resume={node['out']}, or out=DIR"
        )
    return node, [word for word in words if word.split("=")[0].split(".")[0] in ("env", "allow")]


def resumed(folder: Path, words: Sequence[str]) -> tuple[Node, list[str]]:
    """The same of a design that goes on."""
    if changed := [word for word in words if not word.startswith("allow=")]:
        raise ConfigError(f"settings cannot change on resume; omit {changed[0]}")
    file = folder / "design.yaml"
    if not file.exists():
        raise ConfigError(f"no design found in {folder}")
    saved = read_saved(file)
    allow_from(words)
    require_inside(saved["config"], file)
    for word in [*saved["words"], *saved["config"].get("learn", [])]:
        if str(word).startswith(("-", "allow")) and word not in words:
            raise ConfigError(f'{file} holds {word}; if you trust it, add "{word}"')
    return saved["config"], saved["words"]


def facts(node: Node, words: Sequence[str]) -> dict[str, str]:
    """What is said of a design before it begins."""
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
