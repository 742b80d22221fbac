"""Debug size: the rules by which a page's commands and Python are shortened before they run."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

RULES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "small.yaml").read_text())
ADDED: dict[str, list[str]] = RULES["added"]
MOST: dict[str, float] = RULES["most"]
CALLS: dict[str, dict[str, Any]] = RULES["calls"]
RESUMED = 260  # steps, of a debug run of 240
PATIENT = "{hold: 1.0, stop: 10.0, state: 5.0}"  # s: a busy machine is given time, and dry=true
LEARNED = 120  # steps of Stable-Baselines3's example: 20 updates
UNNAMED = re.compile(r"\b(outputs/\w+)-(\d)\b")  # a run folder that no `out=` named


def verb_of(words: Sequence[str]) -> str:
    """`demos collect` of `embodied demos collect ...`; "" for another program."""
    if "-m" in words and "embodied.cli" in words:
        words = words[words.index("embodied.cli") :]
    elif not words or words[0] != "embodied":
        return ""
    pair = " ".join(words[1:3])
    return pair if pair in ADDED else words[1]


def command(words: Sequence[str], folder: str) -> list[str]:
    """The words of a command, with what makes it short."""
    verb = verb_of(words)
    resumes = any(word.startswith("resume=") for word in words)
    short = [_fewer(word, verb, resumes) for word in words]
    given = {word.partition("=")[0] for word in short}
    if resumes or (verb == "view" and not serves(words)):
        return short
    added = [word for word in ADDED.get(verb, []) if word.partition("=")[0] not in given]
    if "model=sindy" in words:  # a fit of seconds, without networks
        added = []
    if "env=robot_reach" in words:  # in real time
        added.append("env.patience=5")  # s until it gives up on an arm that latched a fault
        short = [re.sub(r"^episodes=\d+", "episodes=2", word) for word in short]
    return short + [w.replace("{folder}", folder).replace("{patient}", PATIENT) for w in added]


def has_robot(words: Sequence[str]) -> bool:
    """Whether the command runs a simulated robot in real time."""
    envs = [word for word in words if word.startswith(("env=robot", "experiment=robot"))]
    return verb_of(words) == "deploy" or bool(envs)


def _fewer(word: str, verb: str, resumes: bool) -> str:
    word = UNNAMED.sub(r"\1-debug-\2", word)
    key, _, value = word.partition("=")
    if key not in MOST or not re.fullmatch(r"\d+", value):
        return word
    most = RESUMED if resumes and key == "steps" else MOST.get(f"{verb} {key}", MOST[key])
    return f"{key}={min(int(value), most)}"


def serves(words: Sequence[str]) -> bool:
    """Whether the command goes on until Ctrl-C."""
    writes = any(word.startswith(("export=", "--compare")) for word in words)
    return verb_of(words) == "serve" or (verb_of(words) == "view" and not writes)


class _Calls(ast.NodeTransformer):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = ast.unparse(node.func).removeprefix("em.")
        if ast.unparse(node.func).startswith("em.") and name in CALLS:
            dropped = {*CALLS[name], *(("steps",) if name == "train" else ())}
            keywords = [each for each in node.keywords if each.arg not in dropped]
            made = [ast.keyword(key, ast.Constant(value)) for key, value in CALLS[name].items()]
            node.keywords = [*keywords, *made]
        for each in node.keywords:  # an agent's own train, and callbacks
            if each.arg in RULES["most_calls"] and name.endswith("train"):
                each.value = ast.Constant(RULES["most_calls"][each.arg])
        if name.endswith(".learn"):  # Stable-Baselines3
            node.args = [ast.Constant(LEARNED)]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and node.value.startswith("embodied "):
            words = command(node.value.split(), self.folder)
            return ast.Constant(" ".join(map(_without_spaces, words)))
        return node


def _without_spaces(word: str) -> str:
    """For a page that splits its command at spaces."""
    return word.replace(", ", ",").replace(": ", ":")


def python(code: str, folder: str) -> str:
    """The code, with smaller trainings, evaluations and collections."""
    return ast.unparse(ast.fix_missing_locations(_Calls(folder).visit(ast.parse(code))))
