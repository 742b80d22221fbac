"""What the commands of README and docs configure exists; their Python parses and imports."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from functools import cache
from typing import Any

import pytest

from embodied.commands.demos import demonstrator_of
from embodied.compose import compose
from embodied.core.build import ConfigError
from embodied.core.complete_node import require_settings
from embodied.real_robot.deployment import Deployment, controller_settings, with_allowed
from tests.test_docs import CODE_BLOCK, PAGES, all_commands, is_ours, words_of

PRIMARY = {
    "deploy": "deploy",
    "robot teleop": "teleoperate",
    "robot record": "record",
    "demos collect": "collect",
    "reward preferences": "preferences",
    "reward label": "label",
    "reward design": "design",
    "adopt": "adopt",
    "model train": "model_train",
}
# Runs of a page: a command for one of them (`embodied eval RUN policy.steps=1`) fits one of these.
RUNS = ("fr3_lift_flow", "two_gap_flow", "franka_lift_deploy", "fr3_lift_expo")
# What a command takes before it composes the rest.
OWN_WORDS = {"deploy": ("policy=",), "demos collect": ("policy=",), "reward label": ("out=",)}


def composable() -> list[str]:
    """Commands that configure something else than a training, and leave nothing to fill in."""
    kinds = (*PRIMARY, "eval")
    made_up = re.compile(r"\.\.\.|my_|=[A-Z]+\b|=~|resume=")
    found = [each for each in all_commands() if each.removeprefix("embodied ").startswith(kinds)]
    return [each for each in found if "=" in each and not made_up.search(each)]


@cache
def trained(experiment: str) -> tuple[Any, Any]:
    """The policy and the environment of an experiment."""
    words = [f"experiment={experiment}", "demos=outputs/demos", "init=outputs/bc"]
    node = compose("train", words).node
    return node.get("policy") or node["finetune"], node["env"]


def composes(primary: str, words: list[str], run: str) -> str:
    """What is wrong with a command, in which a run's policy and environment may be changed."""
    policy, env = trained(run)
    try:
        compose(primary, words, given={"policy/as_trained": policy, "env/as_trained": env})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("command", composable(), ids=str)
def test_what_a_command_configures_exists(command: str) -> None:
    """Robots, demonstrators, devices and all their settings are composed, as the command does."""
    words = words_of(command)
    kind = " ".join(words[:2]) if " ".join(words[:2]) in PRIMARY else words[0]
    settings = [word for word in words if re.match(r"[\w.@]+=", word)]
    if kind == "eval":
        wrong = [composes("eval", settings, run) for run in RUNS]
        assert "" in wrong, wrong
        return
    rest = [word for word in settings if not word.startswith(OWN_WORDS.get(kind, ("-",)))]
    if kind == "demos collect" and rest == settings and "demonstrator=" not in command:
        rest.append(f"demonstrator={demonstrator_of(settings, ())}")
    try:
        node = compose(PRIMARY[kind], rest).node
        if kind in ("deploy", "robot teleop", "robot record"):
            require_robot(node["robot"])
    except ConfigError as error:  # a sentence may name a part of a command
        if " is not given" not in str(error):
            raise


def require_robot(node: dict[str, Any]) -> None:
    """ConfigError for settings that the robot or its driver does not have."""
    robot = controller_settings(node)
    robot.pop("_target_")
    require_settings("robot.driver", robot["driver"])
    Deployment.parse({**with_allowed(robot), "policy": ""})


def python_blocks() -> list[Any]:
    found = [
        pytest.param(code, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, (language, code) in enumerate(CODE_BLOCK.findall(page.read_text()))
        if language == "python"
    ]
    return found


@pytest.mark.parametrize("code", python_blocks())
def test_python_is_python_and_imports_what_is_ours(code: str) -> None:
    """Whole tutorials are run by other tests; this holds for every block of every page."""
    text = textwrap.dedent(code)
    if text.startswith("%%writefile"):  # of a notebook
        first, _, text = text.partition("\n")
        text = text if first.endswith(".py") else ""
    for node in ast.walk(ast.parse(re.sub(r"^[%!].*", "", text, flags=re.MULTILINE))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "embodied":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name) or is_ours(f"{node.module}.{alias.name}")
