"""Rewards in configs/reward keep the contract, in the environment of an experiment that
names it: the checks of `embodied check reward`."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from embodied.checks.check import Check
from embodied.checks.reward import CHECKS, RewardSubject, small_run
from embodied.compose import Composition, compose
from embodied.core.build import Node, parse
from embodied.core.errors import NotApplicable
from embodied.datasets.collect import CollectConfig, collect
from tests.builders import exit_of
from tests.tiers import once_per_class, usually

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted((CONFIGS / "reward").glob("*.yaml"))
REWARDS = [file.stem for file in FILES]
NEEDS_A_SERVER = "asks a language model behind a server that is not here: reward.{}.url"
FITTED = ("progress", "rewind")  # to demonstrations, when they are built
FEW = 50  # gradient steps of such a fit
RECORDED = {"demos": "won", "failures": "lost", "data": ("won", "lost")}


@cache
def experiment_of(name: str) -> str | None:
    """The first experiment that chooses this reward, else one whose reward is of the same class."""
    files = sorted((CONFIGS / "experiment").glob("*.yaml"))
    # EnvPool cannot save its rows, and a model would have to be trained.
    files.sort(key=lambda file: bool(re.search("_fast|latent_model", file.read_text())))
    kinds = {file.stem: yaml.safe_load(file.read_text())["_target_"] for file in FILES}
    for wanted in ([name], [other for other in kinds if kinds[other] == kinds[name]]):
        for file in files:
            chosen = re.search(r"override /reward: (\w+)", file.read_text())
            if chosen and chosen[1] in wanted:
                return file.stem
    return None


@cache
def composed(*words: str) -> Composition:
    """Composing takes a tenth of a second, and each check of a reward asks for the same."""
    return compose("train", words)


def node(name: str, folder: Path, records: Path) -> Node:
    """A debug run of the reward's experiment; labels come when they are asked for, and what a
    reward learns from beforehand is recorded in `records`."""
    experiment = experiment_of(name)
    assert experiment is not None, f"no experiment in configs/experiment uses reward={name}"
    words = (f"experiment={experiment}", f"reward={name}", "size=debug", "steps=96")
    made = small_run(copy.deepcopy(composed(*words).node), folder)
    reward = made["reward"]
    if name in FITTED:
        reward["updates"] = FEW
    if "TerminalKeyboard" in str(reward):
        pytest.skip("is a person at a terminal (tests/real_robot/test_teleop.py)")
    if (unmet := _server(reward)) is not None:
        pytest.skip(NEEDS_A_SERVER.format(unmet))
    if name == "advantage":
        reward["potential"]["run"] = str(trained(experiment, records))
    for key, which in RECORDED.items():
        if key in reward and reward[key] is None:
            names = [which] if isinstance(which, str) else list(which)
            paths = [str(recorded(experiment, each, records)) for each in names]
            reward[key] = paths[0] if isinstance(which, str) else paths
    return made


def _server(settings: Any, path: str = "") -> str | None:
    """Where a node names a server's address."""
    if isinstance(settings, dict):
        if settings.get("url"):
            return path.strip(".")
        found = [_server(value, f"{path}.{key}") for key, value in settings.items()]
        return next((each for each in found if each), None)
    return None


def recorded(experiment: str, kind: str, folder: Path) -> Path:
    """A few episodes of the experiment's environment, by its script or at random."""
    out = folder / f"{experiment}_{kind}"
    if not out.exists():
        made = composed(f"experiment={experiment}", "size=debug")
        env, known = str(made.choices["env"]), CONFIGS / "demonstrator"
        names = [env, str(made.node["env"].get("task")), env.rpartition("_")[0], "random"]
        script = next(n for n in names if (known / f"{n}.yaml").exists() or n == "random")
        file = known / f"{script if kind == 'won' else 'random'}.yaml"
        settings = {
            **{"env": made.node["env"], "demonstrator": yaml.safe_load(file.read_text())},
            **{"episodes": 4, "num_envs": 4, "success_only": kind == "won"},
            **{"out": str(out), "images": "png"},
        }
        collect(parse(CollectConfig, settings, "collect"), lambda kept, played: None)
    return out


def trained(experiment: str, folder: Path) -> Path:
    """A run of SAC in the experiment's environment."""
    out = folder / f"{experiment}_trained"
    if not out.exists():
        env = f"env={composed(f'experiment={experiment}').choices['env']}"
        words = (env, "policy=gaussian", "learner=sac", "size=debug", "steps=40", f"out={out}")
        assert exit_of("train", *words, "eval_every=0", "video=false") == 0
    return out


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


# The last check, of exact resume, is made in tests/contract/test_device.py too.
USUAL = usually(CHECKS[:-1], CHECKS)


@pytest.mark.parametrize("file", once_per_class(FILES))
@pytest.mark.parametrize("check", USUAL, ids=lambda check: check.__name__)
def test_the_contract(file: Path, check: Check, records: Path) -> None:
    def run(folder: Path) -> Node:
        return node(file.stem, folder, records)

    try:
        check(RewardSubject(run))
    except NotApplicable as reason:
        pytest.skip(str(reason))


def test_a_reward_without_an_experiment_is_noticed() -> None:
    assert experiment_of("scaled") == "pendulum_scaled"
    assert not [name for name in REWARDS if experiment_of(name) is None]
