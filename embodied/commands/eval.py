"""Evaluate one or more runs on the same held-out initial states."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from embodied.commands import print_rows, require_at_least, runs_in
from embodied.compose import compose
from embodied.core import checkpoint
from embodied.core.atomic_write import write_json
from embodied.core.build import ConfigError, Node, build, kind_of, parse, typed
from embodied.core.config_fields import complete
from embodied.core.device import pick_device, replaced
from embodied.core.env import VecEnv
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.saved_node import read_run_settings, read_saved
from embodied.core.spec import Spec
from embodied.datasets.mapping import Mapping
from embodied.evaluation.certificate import Config as CertificateConfig
from embodied.evaluation.certificate import certificates, lines
from embodied.evaluation.evaluate import Evaluation, counting, evaluate
from embodied.evaluation.statistics import rate
from embodied.evaluation.task_grid import (
    WORST,
    TaskGridEval,
    WorstCase,
    held_out,
    points_of,
    worst_case,
)
from embodied.evaluation.task_grid import Config as SearchConfig
from embodied.learners.learner import load_learner
from embodied.policies.abilities import Smooths
from embodied.policies.remote.address import allow_typed, is_address, remote_node, with_mapping
from embodied.policies.wrappers.translated import joined, with_task
from embodied.reports import run_report
from embodied.training.logger import read_metrics
from embodied.training.warning_signs import parted


@dataclass(frozen=True)
class Subject:
    """A policy that acts in an environment, as the words of a command line have it."""

    name: str  # its run folder, or the address of its server
    node: Node  # the settings of the command
    env: Node
    make: Callable[[Spec], Policy]  # the policy for the spec of the environment
    execute: int | None  # steps of each chunk that are executed (None: all)
    step: int = 0  # of its checkpoint


def run(args: argparse.Namespace) -> None:
    runs, words = runs_in(args.words)
    if not runs:
        raise ConfigError("no run is given: embodied eval RUN [RUN ...] [episodes=200]")
    folders = [run for run in runs if not is_address(run)]
    require_used(words)
    if not any(word.startswith("env=") for word in words):
        require_one_environment([Path(folder) for folder in folders])
    rows: list[dict[str, Any]] = []
    for path in runs:
        if is_address(path):
            allow_typed([path])
            rows.append(evaluate_served(path, words, args.config_dir))
        else:
            rows.append(evaluate_run(Path(path), words, args.config_dir))
    print_table(rows)


def require_used(words: list[str]) -> None:
    for prefix, needed in (("search.", "worst_case="), ("certify.", "certify.radii=")):
        if any(w.startswith(prefix) for w in words) and not any(
            w.startswith(needed) for w in words
        ):
            raise ConfigError(f"{prefix}NAME=... has no effect without {needed}...")


def require_one_environment(runs: list[Path]) -> None:
    found: dict[str, Path] = {}
    for run in runs:
        env = trained_with(checkpoint.find(run)).get("env") or {}
        named = [env[key] for key in ("_target_", "id", "task") if env.get(key) is not None]
        found.setdefault(" ".join(str(name).rpartition(".")[2] for name in named), run)
    if len(found) > 1:
        each = ", ".join(f"{run} in {env}" for env, run in found.items())
        raise ConfigError(
            f"results of different environments do not compare: {each}; evaluate them one by one, "
            "or name an environment for all: env=NAME"
        )


def evaluate_served(address: str, words: list[str], folders: list[str]) -> dict[str, Any]:
    subject = served_subject(address, words, folders)
    if subject.node["out"] is not None:
        raise ConfigError("out= is for runs, not for a policy server")
    if subject.node["certify"]["radii"]:
        raise ConfigError("certify.radii=... is for runs, not for a policy server")
    if asks_worst(subject.node):
        return worst_row(subject, worst_of(subject)[0])
    return result_row(subject, evaluated(subject)[0])


def served_subject(
    address: str,
    words: list[str],
    folders: Sequence[str],
    primary: str = "eval",
    there: Node | None = None,
) -> Subject:
    """The policy of a server, for the command with `configs/PRIMARY.yaml`; in the environment
    `there`, if the words name none."""
    if there is None and not any(word.startswith("env=") for word in words):
        raise ConfigError(f"name the environment: embodied {primary} {address} env=NAME")
    given = {"policy/as_trained": remote_node(address)[0], "env/as_trained": there or {}}
    node = compose(primary, words, folders, given).node
    prompt = {} if node["task"] is None else {"prompt": node["task"]}

    def connected(spec: Spec) -> Policy:
        acting = with_mapping({**node["policy"], **prompt}, node["mapping"])
        return build(acting, Policy, spec=spec).eval()

    return Subject(address, node, node["env"], connected, executed(node, None))


def evaluate_run(path: Path, words: list[str], folders: list[str]) -> dict[str, Any]:
    """Evaluate the newest checkpoint of `path`; adds a line to RUN/evaluations.jsonl."""
    subject = run_subject(path, words, folders)
    run, node = Path(subject.name), subject.node
    out = None if node["out"] is None else Path(node["out"])
    certificate = certificate_settings(node)
    if asks_worst(node):
        found, policy = worst_of(subject)
        row, metrics = worst_row(subject, found), found.metrics()
        write_json((out or run) / WORST, found.to_json())
    else:
        result, policy = evaluated(subject)
        row = result_row(subject, result) | imagined_beside(run, subject, result)
        metrics = result.metrics()
        if certificate.radii and isinstance(policy, Smooths):
            metrics |= certify(row, result, policy.noise_std(), certificate)
    if node["policy"] != read_saved(checkpoint.find(path) / "policy.yaml"):
        row["policy"] = policy.node
    add_line(run / "evaluations.jsonl", row)
    run_report.write(run)
    if out is not None:
        scores = {f"eval/{name}": value for name, value in metrics.items()}
        add_line(out / "metrics.jsonl", {"step": subject.step, **scores})
    return row


def run_subject(
    path: Path,
    words: list[str],
    folders: Sequence[str],
    primary: str = "eval",
    there: Node | None = None,
) -> Subject:
    """The newest checkpoint of `path`, for the command with `configs/PRIMARY.yaml`; in the
    environment `there` (None: its run's own), if the words name none."""
    saved = checkpoint.find(path)
    acting = read_saved(saved / "policy.yaml")
    named = any(word.startswith("env=") for word in words)
    settings = trained_with(saved, named or there is not None)
    given = {"policy/as_trained": acting}
    if known := there or settings.get("env"):
        given["env/as_trained"] = known
    elif not named:
        raise ConfigError(
            f"{path} was trained without an environment: env=NAME, and mapping=FILE where its "
            "names or units are others"
        )
    node = compose(primary, words, folders, given).node
    mapping = None if node["mapping"] is None else Mapping.load(node["mapping"])
    device = pick_device(node["device"])

    def loaded(spec: Spec) -> Policy:
        return fitted(saved, spec, mapping, node, settings).to(device)

    env = replaced(node["env"], "device", "auto", str(device))
    execute = executed(node, settings.get("execute"))
    step = int(checkpoint.read_about(saved)["step"])
    return Subject(str(saved.parent.parent), node, env, loaded, execute, step)


def executed(node: Node, as_trained: int | None) -> int | None:
    return as_trained if node["execute"] == "as_trained" else node["execute"]


def evaluated(subject: Subject) -> tuple[Evaluation, Policy]:
    """The result of a policy in its environment, and the policy; where the environment has held-out
    tasks, those are the episodes."""
    node = subject.node
    require_at_least(node, {"episodes": 1, "num_envs": 1, "seed": 0, "threads": 1})
    torch.set_num_threads(node["threads"])
    env = build(subject.env | {"num_envs": min(node["num_envs"], node["episodes"])}, VecEnv)
    try:
        tasks = held_out(env)
        if tasks is not None and node.get("certify", {}).get("radii"):
            raise ConfigError("certify.radii: held-out tasks are no random sample of episodes")
        if tasks is not None:
            env = TaskGridEval(env, tasks[: node["episodes"]])
            node["episodes"] = len(env.tasks)
        policy = subject.make(env.spec)
        episodes, execute = node["episodes"], subject.execute
        shown = counting(episodes)
        return evaluate(policy, env, episodes, node["seed"], execute, shown), policy
    finally:
        env.close()


def certificate_settings(node: Node) -> CertificateConfig:
    """The certificates that the settings of `embodied eval` ask for; ConfigError where the policy
    or the evaluation has none."""
    config = parse(CertificateConfig, node["certify"], "certify")
    if not config.radii:
        return config
    node["policy"] = policy = complete(node["policy"])
    if not issubclass(kind_of(policy, Policy), Smooths) or not policy["sigma"]:
        raise ConfigError("certify.radii: only policy=smoothed with policy.sigma above 0 has them")
    if policy["attack"] != "none":
        raise ConfigError("certify.radii: certificates are of episodes without policy.attack")
    if asks_worst(node):
        raise ConfigError("certify.radii: not with worst_case=true")
    return config


def certify(
    row: dict[str, Any], result: Evaluation, sigma: float, config: CertificateConfig
) -> dict[str, float]:
    """Add the certificates of a result to its row and print them; their metrics."""
    found = certificates(result, sigma, config)
    row["certified"] = [vars(each) for each in found]
    print("\n".join(lines(found, config.alpha)), flush=True)
    known = {
        f"certified_{name}_{each.radius:g}": value
        for each in found
        for name, value in (("return", each.mean_return), ("success", each.success))
    }
    return {name: value for name, value in known.items() if value is not None}


def asks_worst(node: Node) -> bool:
    return typed(bool, node["worst_case"], "worst_case")


def worst_of(subject: Subject) -> tuple[WorstCase, Policy]:
    """The worst parameters of its environment for a policy, and the policy."""
    node = subject.node
    require_at_least(node, {"episodes": 1, "num_envs": 1, "seed": 0, "threads": 1})
    config = parse(SearchConfig, node["search"], "search")
    torch.set_num_threads(node["threads"])
    env = build(subject.env | {"num_envs": min(node["num_envs"], config.episodes)}, VecEnv)
    try:
        policy, episodes = subject.make(env.spec), config.episodes
        shown = counting(points_of(env, config) * episodes)
        found = worst_case(
            policy,
            env,
            config,
            node["episodes"],
            node["seed"],
            subject.execute,
            lambda points: shown(points * episodes),
        )
        return found, policy
    finally:
        env.close()


def worst_row(subject: Subject, found: WorstCase) -> dict[str, Any]:
    row = result_row(subject, found.result) | {"worst": found.to_json()["values"]}
    print(f"{subject.name}: {found}", flush=True)
    return row


def add_line(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as sink:
        sink.write(json.dumps(row) + "\n")


def trained_with(saved: Path, named: bool = False) -> Node:
    """The run.yaml of the run that a checkpoint is in; it may be missing if env= is `named`."""
    file = saved.parent.parent / "run.yaml"
    if file.exists():
        return read_run_settings(file)
    if named:
        return {}
    raise ConfigError(f"{file} is missing; name the environment of {saved}: env=NAME")


def fitted(saved: Path, spec: Spec, mapping: Mapping | None, node: Node, trained: Node) -> Policy:
    """The policy of a checkpoint for an environment with `spec`, as `node["policy"]` asks for it,
    told to do `node["task"]` where it has several."""
    policy, asked = checkpoint.load_policy(saved), node["policy"]
    if kind_of(asked, Policy) is type(policy):  # other settings, before the mapping
        policy = asked_for(policy, asked, saved, trained)
        return joined(with_task(policy, node["task"], spec), spec, mapping, saved)
    policy = joined(with_task(policy, node["task"], spec), spec, mapping, saved)
    return asked_for(policy, asked, saved, trained)


def asked_for(policy: Policy, node: Node, saved: Path, trained: Node) -> Policy:
    """The policy to evaluate, by `node`: as trained, with other settings (such as the steps of a
    sampler), or inside a wrapper such as best_of_n, which may use the run's critic."""
    kind: Any = kind_of(node, Policy)
    if type(policy) is kind:
        return checkpoint.with_settings(policy, node, saved)
    if not issubclass(kind, PolicyWrapper) or not kind.for_evaluation:
        raise ConfigError(
            f"{kind.__name__} cannot be evaluated with the weights of a {type(policy).__name__} "
            f"({saved}); leave policy out"
        )
    wrap: Any = kind.wrap
    if kind.requires_critic:
        return wrap(policy, node, critic=critic_of(saved, trained, policy)).eval()
    return wrap(policy, node).eval()


def critic_of(saved: Path, trained: Node, policy: Policy) -> nn.Module:
    if trained.get("learner") is None:
        raise ConfigError(
            f"{saved.parent.parent} has no learner, and so no critic to choose actions: train it "
            "first, as with finetune=dsrl_na, and evaluate that run"
        )
    learner = load_learner(saved, trained, policy)
    critic = getattr(learner, "critic", None)
    if critic is None or not hasattr(critic, "each") or critic.out != 1:
        raise ConfigError(f"{type(learner).__name__} ({saved}) has no critic to choose actions")
    return critic


def result_row(subject: Subject, result: Evaluation) -> dict[str, Any]:
    node = subject.node
    row: dict[str, Any] = {
        "run": subject.name,
        "step": subject.step,
        "episodes": len(result.returns),
        "seed": node["seed"],
        "env": node["env"],
        "return": result.returns.mean().item(),
        "length": result.lengths.float().mean().item(),
    }
    if node["task"] is not None:
        row["task"] = node["task"]
    if result.success is not None:
        row["successes"] = int(result.success.sum())
    if result.change is not None:
        row["change"] = result.change.mean().item()
    return row


def imagined_beside(run: Path, subject: Subject, result: Evaluation) -> dict[str, float]:
    """The imagined success of a run in a model at its last evaluation, as `imagined`, for a policy
    that was just evaluated in a real environment; a warning where the two have parted."""
    known = [row for row in read_metrics(run) if "eval/imagined_success" in row]
    at = [row for row in known if row["step"] <= subject.step]
    if result.success is None or not at:
        return {}
    imagined = float(at[-1]["eval/imagined_success"])
    if line := parted({**result.metrics(), "imagined_success": imagined}):
        print(f"embodied: {line}", file=sys.stderr, flush=True)
    return {"imagined": imagined}


def print_table(rows: list[dict[str, Any]]) -> None:
    lines: list[tuple[str, ...]] = []
    imagined = any("imagined" in row for row in rows)
    for row in rows:
        known = "successes" in row
        other = f" ({row['policy']['_target_'].rpartition('.')[2]})" if "policy" in row else ""
        lines.append(
            (
                row["run"] + other,
                f"{row['step']:,}",
                rate(row["successes"], row["episodes"]) if known else "-",
                *([f"{row['imagined']:.0%}" if "imagined" in row else "-"] if imagined else ()),
                f"{row['return']:,.2f}",
                f"{row['length']:.1f}",
                str(row["episodes"]),
            )
        )
    more = ("imagined",) if imagined else ()
    print_rows(("run", "step", "success [95%]", *more, "return", "length", "episodes"), lines)
