"""Rules of a fair study: what it has to compare with, and when an interval may be printed.

A study of an improvement (of a base policy, or from recorded data) names three controls: cloning
of the best third of the data, the base policy with its best sampler settings at the task's own
horizon, and the method without its defining part. All variants that act have one budget of
environment steps. Settings are chosen on seeds that are not reported. The environment is the
task's own in all variants, the horizon included; a study says why where it is not.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.compose import PACKAGED, Composition, compose, option, options
from embodied.core.build import ConfigError, Node
from embodied.evaluation.statistics import bootstrap_interval, iqm
from embodied.study.study import Study, filled
from embodied.training.config import regime_of

CONTROLS: Mapping[str, str] = {
    "filtered_cloning": "cloning of the best third of the data",
    "best_sampler": "the base with its best sampler settings at the task's own horizon",
    "without_part": "the method without its defining part",
}
NOISE = "best_fixed_noise"  # the control of steering by noise
INPUTS: Mapping[str, frozenset[str]] = {  # what fine-tuners take beside a base policy and rewards
    "dsrl": frozenset(),
    "dsrl_na": frozenset(),
    "residual": frozenset(),
    "ticket": frozenset(),
    "dppo": frozenset({"diffusion"}),
    "dsrl_features": frozenset({"images"}),
    "expo": frozenset({"demonstrations"}),
    "reinflow": frozenset({"flow"}),
}
MIN_SEEDS = 5  # the bootstrap interval of fewer seeds is their range
POINTS = 0.02  # of success, or of the range of another score: a smaller gain is none
WORK = Path("W")  # need not exist: settings are composed, nothing is read
PARALLEL = ("num_envs", "threads")  # settings of an environment that change its speed only


def problems(study: Study) -> Iterator[str]:
    """What is not fair in a study, one line each, the cheap rules first. ConfigError if the
    settings of a variant are wrong."""
    yield from _unnamed(study)
    if study.kind == "improvement":
        yield from _changed_env(study)
        yield from _missing_noise(study)
        yield from _wrong_part(study)
        yield from _not_compared(study)
    yield from _unequal(study)


def tuning_problems(study: Study) -> list[str]:
    """A line if settings were chosen on reported seeds, or if the study does not say on which."""
    if study.tuning_seeds is None:
        return ["tuning_seeds: on which seeds were settings chosen? ([]: none were)"]
    both = sorted(set(study.tuning_seeds) & set(study.seeds))
    return [f"settings were chosen on reported seeds: {both}"] if both else []


def still_missing(study: Study) -> list[str]:
    """A line for each control that `not_yet_run` promises and no variant is."""
    roles = study.not_yet_run.keys() & {*CONTROLS, NOISE} - study.controls.keys()
    return [f"add the control that is not yet run: {role}" for role in sorted(roles)]


def seeds_alone(study: Study, seeds: Sequence[int]) -> str:
    """Why no interval may be printed for these seeds; empty if it may."""
    if len(seeds) < MIN_SEEDS:
        return f"{len(seeds)} seeds"
    if study.tuning_seeds is None:
        return "tuning seeds were not recorded"
    if set(study.tuning_seeds) & set(seeds):
        return "settings were chosen on one of them"
    return ""


def verdict(gain: NDArray[np.float64], curve: Mapping[str, Any] | None, direction: str) -> str:
    """What is said of a result whose difference `gain` [S] from the baseline is significantly for
    the worse: "; BELOW" if its `curve` (steps [P], scores [S, P]) is flat, else why that is not
    known; "" of any other result."""
    sign = 1 if direction == "maximize" else -1
    if bootstrap_interval(sign * gain)[1] >= 0:
        return ""
    if not curve:
        return "; worse, no curve"
    steps, scores = np.asarray(curve["steps"]), np.asarray(curve["scores"])
    return "; BELOW" if flat(steps, scores, sign) else "; worse, not flat"


def flat(steps: NDArray[np.float64], scores: NDArray[np.float64], sign: int = 1) -> bool:
    """Whether scores [S, P] no longer rise (`sign` -1: fall) over the last third of the steps [P]:
    from the last evaluation before that third to the last of all, the interquartile mean over seeds
    of the gain is below two points (of 100%; of the curve's range for scores outside [0, 1])."""
    before = np.flatnonzero(steps <= steps[-1] * 2 / 3)
    share = scores.min() >= 0 and scores.max() <= 1
    least = POINTS * (1.0 if share else float(np.ptp(scores)))
    return len(before) > 0 and iqm(sign * (scores[:, -1] - scores[:, before[-1]])) < least


def rivals(study: Study) -> list[str]:
    """The fine-tuners that take the same inputs as the result's, and are no variants."""
    used = {_choice(study, variant, "finetune") for variant in study.variants}
    own = INPUTS.get(_choice(study, study.result, "finetune"))
    if own is None:
        return []
    inputs = own | {_choice(study, study.baseline, "policy")}
    return [name for name, takes in INPUTS.items() if takes <= inputs and name not in used]


def changed_env(study: Study, variant: str) -> dict[str, Any]:
    """The settings of a variant's environment that are not the task's own, by dotted key."""
    found = composed(study, variant)
    if found is None:
        return {}
    name, node = found.choices["env"], found.node["env"]
    if real := found.choices.get("env@eval.env"):  # trained in a model, measured there
        name, node = real, found.node["eval"]["env"]
    own, given = _flat(_env_node(str(name))), _flat(node)
    keys = (own.keys() | given.keys()) - set(PARALLEL)
    return {key: given.get(key) for key in sorted(keys) if own.get(key) != given.get(key)}


def env_steps(study: Study, variant: str) -> int:
    """The environment steps of a variant's training; 0 if it is offline or no training. ConfigError
    if its settings are wrong."""
    words = shlex.split(study.line(variant, study.seeds[0], WORK))
    if words[0] == "python" or (words[1] == "improve" and "ways=[]" not in words):
        given = (word.partition("=")[2] for word in words if word.startswith("steps="))
        return int(next(given, "0"))
    found = composed(study, variant) if words[1] == "train" else None
    if found is None or regime_of(found.node) == "offline":
        return 0
    return int(found.node["steps"]) - int(found.node["data"].get("pretrain_steps", 0))


def composed(study: Study, variant: str) -> Composition | None:
    """The settings of a variant's training; of one that is evaluated, in the environment of the
    evaluation. None of a program of its own. ConfigError if the settings are wrong."""
    words = _words(study, study.line(variant, study.seeds[0], WORK))
    try:
        return _compose(words) if words else None
    except ConfigError as error:
        raise ConfigError(f"variant {variant}: {error}") from error


def _words(study: Study, line: str) -> tuple[str, ...]:
    """The words of `embodied train` that `line` stands for: those of the run that an evaluation
    reads, then its own settings of the environment; none for a program."""
    command, kind, *rest = shlex.split(line)
    if command != "embodied":
        return ()
    # Neither changes what is compared, and equal words are composed once.
    words = [word for word in rest if not word.startswith(("allow=", "out=", "seed=", "video="))]
    if kind == "train":
        return tuple(words)
    seed = study.seeds[0]
    lines = [filled(text, work=WORK) for text in study.prepare]
    lines += [text for name in study.before for text in study.lines_before(name, seed, WORK)]
    lines += [text for task in study.tasks(seed, WORK) for text in task.lines.values()]
    lines += [study.line(name, seed, WORK) for name in study.variants]
    named = any(word.startswith("env=") for word in words)  # it is of no other environment
    made = [] if named else [text for text in lines if f"out={rest[0]}" in text.split()]
    before = _words(study, made[0]) if made else ("policy=gaussian", "learner=sac")
    return (*before, *(word for word in words if word.startswith(("env=", "env."))))


@cache
def _compose(words: tuple[str, ...]) -> Composition:
    return compose("train", words)


@cache
def _env_node(name: str) -> Node:
    return compose("train", (f"env={name}", "policy=gaussian", "learner=sac")).node["env"]


def _flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in node.items():
        nested = isinstance(value, Mapping) and value
        found |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def _choice(study: Study, variant: str, group: str) -> str:
    """The chosen option of `group`; of an improvement that of its recipe, if it names one way."""
    words = shlex.split(study.line(variant, study.seeds[0], WORK)) if variant else []
    if words[:2] == ["embodied", "improve"]:
        known = options("way", [PACKAGED])
        recipes = [option(known[way]) for way in known if f"ways=[{way}]" in words]
        chosen = [word for node in recipes for word in shlex.split(str(node["words"]))]
        return next((w.partition("=")[2] for w in chosen if w.startswith(f"{group}=")), "None")
    found = composed(study, variant) if variant else None
    return str(found.choices.get(group)) if found else ""


def _excused(study: Study, what: str) -> bool:
    return what in study.exempt or what in study.not_yet_run


def _unnamed(study: Study) -> Iterator[str]:
    if not study.kind:
        yield "kind: improvement, comparison or reproduction is missing"
    for role, variant in study.controls.items():
        if role not in {*CONTROLS, NOISE}:
            yield f"controls: there is no {role!r}"
        if variant not in study.variants:
            yield f"controls.{role}: there is no variant {variant!r}"
    for role, says in CONTROLS.items() if study.kind == "improvement" else ():
        if role not in study.controls and not _excused(study, role):
            yield f"it has no control {role}: {says}"


def _changed_env(study: Study) -> Iterator[str]:
    changed: dict[str, list[str]] = {}
    for variant in study.variants:
        for key, value in changed_env(study, variant).items():
            changed.setdefault(f"env.{key}", []).append(f"{variant} {value}")
    for key, told in changed.items():
        if key not in study.exempt:
            yield f"{key} is not the task's own ({', '.join(told)}): exempt: {{{key}: WHY}}"


def _missing_noise(study: Study) -> Iterator[str]:
    """A fixed noise that was searched, against steering by noise."""
    steered = [v for v in study.variants if _choice(study, v, "finetune").startswith("dsrl")]
    if steered and NOISE not in study.controls and not _excused(study, NOISE):
        yield f"it has no control {NOISE} of {steered[0]}: the best noise that a search finds"


def _wrong_part(study: Study) -> Iterator[str]:
    """What is left of IQL without its weights is IQL whose advantages do not weigh."""
    part = study.controls.get("without_part", "")
    if _choice(study, study.result, "learner") != "iql" or part not in study.variants:
        return
    found = composed(study, part)
    if found is None or found.choices["learner"] != "iql" or found.node["learner"]["beta"] != 0:
        yield f"controls.without_part: {part} is not the same with learner.beta=0"


def _not_compared(study: Study) -> Iterator[str]:
    if study.advice and (left := [name for name in rivals(study) if not _excused(study, name)]):
        yield f"advice without a comparison with {', '.join(left)}, which take the same inputs"


def _unequal(study: Study) -> Iterator[str]:
    if "budget" in study.exempt:
        return
    steps = {name: env_steps(study, name) for name in study.variants}
    acting = {name: count for name, count in steps.items() if count}
    if len(set(acting.values())) > 1:
        told = ", ".join(f"{name} {count:,}" for name, count in acting.items())
        yield f"variants have different numbers of environment steps: {told}"
