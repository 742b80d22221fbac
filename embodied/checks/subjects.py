"""What is checked: composed from a kind, a name and settings, as a command line gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from embodied.checks import env, learner, policy, reward, teacher, teacher_games
from embodied.checks.check import Check
from embodied.checks.choose import chosen_part
from embodied.checks.env import EnvSubject
from embodied.checks.learner import LearnerSubject
from embodied.checks.policy import SPECS, PolicySubject
from embodied.checks.reward import RewardSubject, small_run
from embodied.checks.teacher import GAME, TeacherSubject, need
from embodied.compose import compose, options, search_folders
from embodied.core.build import ConfigError, Node, build, kind_of
from embodied.core.env import VecEnv
from embodied.core.policy import PolicyWrapper
from embodied.policies.steering.steered import Steered

KINDS = ("env", "policy", "learner", "reward", "teacher", "robot")
ANY_LEARNER = "learner=imitate"
"""A learner has to be chosen for every composition; this one is not built."""


@dataclass(frozen=True)
class Checked:
    """Checks, and what they run on; `title` says what it is."""

    title: str
    checks: Sequence[Check]
    subject: Any


def subjects(
    kind: str, name: str, words: Sequence[str], folders: Sequence[Path | str]
) -> list[Checked]:
    """What `embodied check KIND NAME key=value ...` runs. ConfigError for what cannot be composed.

    NAME is an option of the group, the dotted name of a class ("my_lab.plane.Plane"), or for an
    environment a Gymnasium id ("Pendulum-v1", "my_lab:Plane-v0").
    """
    words = [
        text.replace(f"{name}.", f"{kind}.", 1) if text.startswith(f"{name}.") else text
        for text in words
    ]
    if kind == "robot":
        from embodied.checks.robot import CHECKS, RobotSubject

        made = compose("deploy", [f"robot={name}", *words], folders)
        return [Checked("", CHECKS, RobotSubject(made.node["robot"]))]
    chosen, given = chosen_part(kind, name, folders)
    composed = compose("train", _completed(kind, [*chosen, *words]), folders, given).node
    node = composed[kind]
    if kind == "env":
        return [Checked("", env.CHECKS, EnvSubject(node))]
    if kind == "policy":
        return _policy(node, composed if any(w.startswith("env=") for w in words) else None)
    if kind == "learner":
        picked = composed["policy"] if any(w.startswith("policy=") for w in words) else None
        return [Checked("", learner.CHECKS, learner_subject(node, folders, picked))]
    if kind == "reward":
        return [Checked("", reward.CHECKS, RewardSubject(lambda out: small_run(composed, out)))]
    game = need(node["_target_"]) == GAME
    checks = teacher_games.CHECKS if game else teacher.CHECKS
    return [Checked("", checks, TeacherSubject(node))]


def _completed(kind: str, words: list[str]) -> list[str]:
    """`words` with the other parts of a run, where they do not matter."""
    given = {word.partition("=")[0] for word in words}
    if "experiment" in given or kind == "reward":
        size = [] if "size" in given else ["size=debug"]
        if kind == "reward" and not given & {"experiment", "env"}:
            raise ConfigError(
                "a reward is checked in a run: add experiment=NAME, or env= policy= learner="
            )
        return [*words, *size]
    return words if "learner" in given else [*words, ANY_LEARNER]


def _policy(node: Node, composed: Node | None) -> list[Checked]:
    """The policy with the observations of env=NAME, else with made-up ones of three kinds."""
    if composed is None:
        return [
            Checked(f"observations: {title}", policy.CHECKS, PolicySubject(node, spec))
            for title, spec in SPECS.items()
        ]
    made = build(composed["env"] | {"num_envs": 1}, VecEnv)
    made.close()
    return [Checked("", policy.CHECKS, PolicySubject(node, made.spec))]


def learner_subject(
    node: Node, folders: Sequence[Path | str], picked: Node | None = None
) -> LearnerSubject:
    """A learner with `picked` (None: every policy, then every fine-tuner, of `folders`)."""
    if picked is not None:
        return LearnerSubject(node, (picked,))
    found = [(group, yaml.safe_load(path.read_text())) for group, path in candidates(folders)]
    nodes = {kind: [each for group, each in found if group == kind] for kind, _ in found}
    inner = nodes["policy"][0]
    wrapped: list[tuple[Node, Node | None]] = []
    for each in nodes["finetune"]:
        steered = issubclass(kind_of(each, PolicyWrapper), Steered)
        wrapped.append((each, inner if steered else None))
    return LearnerSubject(node, nodes["policy"], wrapped)


def candidates(folders: Sequence[Path | str] = ()) -> list[tuple[str, Path]]:
    """Every policy, the Gaussian one first, then every fine-tuner."""
    search, groups = search_folders(folders), ("policy", "finetune")
    found = [(group, path) for group in groups for path in options(group, search).values()]
    return sorted(found, key=lambda f: (groups.index(f[0]), f[1].stem != "gaussian", f[1].stem))
