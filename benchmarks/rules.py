"""Rules of a fair study: what it has to compare with, and when an interval may be printed.

A study of an improvement (of a base policy, or from recorded data) names three controls: cloning
of the best third of the data, the base policy with its best sampler settings at the task's own
horizon, and the method without its defining part. All variants that act have one budget of
environment steps. Settings are chosen on seeds that are not reported.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from embodied.core.build import ConfigError
from embodied.study.study import Study

CONTROLS: Mapping[str, str] = {
    "filtered_cloning": "cloning of the best third of the data",
    "best_sampler": "the base with its best sampler settings at the task's own horizon",
    "without_part": "the method without its defining part",
}
MIN_SEEDS = 5  # the bootstrap interval of fewer seeds is their range


def problems(study: Study) -> list[str]:
    """What is not fair in a study, one line each; empty if nothing."""
    found = [] if study.kind else ["kind: improvement, comparison or reproduction is missing"]
    found += [f"controls: there is no {role!r}" for role in study.controls if role not in CONTROLS]
    if study.kind == "improvement":
        found += [
            f"it has no control {role}: {says}"
            for role, says in CONTROLS.items()
            if role not in study.controls and role not in study.exempt
        ]
    for role, variant in study.controls.items():
        if variant not in study.variants:
            found.append(f"controls.{role}: there is no variant {variant!r}")
    return found + _unequal(study)


def tuning_problems(study: Study) -> list[str]:
    """A line if settings were chosen on reported seeds, or if the study does not say on which."""
    if study.tuning_seeds is None:
        return ["tuning_seeds: on which seeds were settings chosen? ([]: none were)"]
    both = sorted(set(study.tuning_seeds) & set(study.seeds))
    return [f"settings were chosen on reported seeds: {both}"] if both else []


def seeds_alone(study: Study, seeds: Sequence[int]) -> str:
    """Why no interval may be printed for these seeds; empty if it may."""
    if len(seeds) < MIN_SEEDS:
        return f"{len(seeds)} seeds"
    if study.tuning_seeds is None:
        return "tuning seeds were not recorded"
    if set(study.tuning_seeds) & set(seeds):
        return "settings were chosen on one of them"
    return ""


def _unequal(study: Study) -> list[str]:
    if "budget" in study.exempt:
        return []
    steps = {name: env_steps(study, name) for name in study.variants}
    acting = {name: count for name, count in steps.items() if count}
    if len(set(acting.values())) < 2:
        return []
    told = ", ".join(f"{name} {count:,}" for name, count in acting.items())
    return [f"variants have different numbers of environment steps: {told}"]


def env_steps(study: Study, variant: str) -> int:
    """The environment steps of a variant's training; 0 if it is offline or no training. ConfigError
    if its settings are wrong."""
    from embodied.compose import compose
    from embodied.training.config import regime_of

    words = shlex.split(study.line(variant, study.seeds[0], Path("W")))
    if words[0] == "python":
        given = (word.partition("=")[2] for word in words if word.startswith("steps="))
        return int(next(given, "0"))
    if words[1] != "train":
        return 0
    try:
        # The folders of other runs need not exist yet.
        own = [word for word in words[2:] if not word.startswith(("allow=", "out="))]
        node = compose("train", own, []).node
    except ConfigError as error:
        raise ConfigError(f"variant {variant}: {error}") from error
    if regime_of(node) == "offline":
        return 0
    return int(node["steps"]) - int(node["data"].get("pretrain_steps", 0))
