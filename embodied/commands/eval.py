"""Evaluate one or more runs on the same held-out initial states."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embodied.commands import is_given, require_at_least
from embodied.compose import compose
from embodied.core import checkpoint
from embodied.core.atomic_write import write_json
from embodied.core.build import ConfigError, Node, build, kind_of, parse, typed
from embodied.core.config_fields import complete
from embodied.core.device import pick_device, replaced
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.saved_node import read_saved
from embodied.core.spec import Spec
from embodied.datasets.mapping import Mapping
from embodied.evaluation import certificate, task_grid
from embodied.evaluation.evaluate import Evaluation, counting, evaluate
from embodied.evaluation.loading import NoCritic, fitted, trained_with
from embodied.evaluation.statistics import rate
from embodied.policies.abilities import Smooths
from embodied.policies.remote.address import allow_typed, is_address, remote_node, with_mapping
from embodied.reports import run_report
from embodied.reports.terminal import print_rows
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

    def open_env(self, episodes: int) -> VecEnv:
        """Its environment for so many episodes."""
        require_at_least(self.node, {"episodes": 1, "num_envs": 1, "seed": 0, "threads": 1})
        torch.set_num_threads(self.node["threads"])
        return build(self.env | {"num_envs": min(self.node["num_envs"], episodes)}, VecEnv)


def run(args: argparse.Namespace) -> None:
    for prefix, needed in (("search.", "worst_case="), ("certify.", "certify.radii=")):
        named = any(word.startswith(prefix) for word in args.words)
        if named and not any(word.startswith(needed) for word in args.words):
            raise ConfigError(f"{prefix}NAME=... has no effect without {needed}...")
    if not is_given(args.words, "env"):
        _require_one_environment([Path(run) for run in args.names if not is_address(run)])
    print_table([evaluate_run(run, args.words, args.config_dir) for run in args.names])


def _require_one_environment(runs: list[Path]) -> None:
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


def subject_of(
    policy: str | Path,
    words: Sequence[str],
    folders: Sequence[str],
    primary: str = "eval",
    there: Node | None = None,
) -> Subject:
    """The newest policy of a run, or that of a server, for the command with `configs/PRIMARY.yaml`;
    in the environment `there` (None: its run's own), if the words name none."""
    if is_address(str(policy)):
        return _served_subject(str(policy), words, folders, primary, there)
    saved = checkpoint.find(policy)
    named = is_given(words, "env")
    settings = trained_with(saved, named or there is not None)
    given = {"policy/as_trained": read_saved(saved / "policy.yaml")}
    if known := there or settings.get("env"):
        given["env/as_trained"] = known
    elif not named:
        raise ConfigError(
            f"{policy} was trained without an environment: env=NAME, and mapping=FILE where its "
            "names or units are others"
        )
    node = compose(primary, words, folders, given).node
    mapping = None if node["mapping"] is None else Mapping.load(node["mapping"])
    device = pick_device(node["device"])

    def loaded(spec: Spec) -> Policy:
        try:
            return fitted(saved, spec, mapping, node, settings).to(device)
        except NoCritic as error:
            mend = "train it first, as with finetune=dsrl_na, and evaluate that run"
            raise ConfigError(f"{error}: {mend}") from error

    env = replaced(node["env"], "device", "auto", str(device))
    execute = settings.get("execute") if node["execute"] == "as_trained" else node["execute"]
    step = int(checkpoint.read_about(saved)["step"])
    return Subject(str(saved.parent.parent), node, env, loaded, execute, step)


def _served_subject(
    address: str, words: Sequence[str], folders: Sequence[str], primary: str, there: Node | None
) -> Subject:
    if there is None and not is_given(words, "env"):
        raise ConfigError(f"name the environment: embodied {primary} {address} env=NAME")
    allow_typed([address])
    given = {"policy/as_trained": remote_node(address)[0], "env/as_trained": there or {}}
    node = compose(primary, words, folders, given).node
    prompt = {} if node["task"] is None else {"prompt": node["task"]}

    def connected(spec: Spec) -> Policy:
        acting = with_mapping({**node["policy"], **prompt}, node["mapping"])
        return build(acting, Policy, spec=spec).eval()

    execute = None if node["execute"] == "as_trained" else node["execute"]
    return Subject(address, node, node["env"], connected, execute)


def evaluate_run(path: str | Path, words: list[str], folders: list[str]) -> dict[str, Any]:
    """Evaluate the newest checkpoint of `path`, which adds a line to RUN/evaluations.jsonl; or a
    policy server, of which nothing is kept."""
    subject = subject_of(path, words, folders)
    node = subject.node
    served = is_address(str(path))
    if served and node["out"] is not None:
        raise ConfigError("out= is for runs, not for a policy server")
    if served and node["certify"]["radii"]:
        raise ConfigError("certify.radii=... is for runs, not for a policy server")
    certified = _certificate_config(node)
    worst = None
    if _asks_worst(node):
        worst, policy = _worst_of(subject)
        row = result_row(subject, worst.result) | {"worst": worst.to_json()["values"]}
        metrics = worst.metrics()
        print(f"{subject.name}: {worst}", flush=True)
    else:
        result, policy = evaluated(subject)
        row = result_row(subject, result)
        metrics = result.metrics()
        if not served:
            row |= _imagined_beside(subject, result)
        if certified.radii and isinstance(policy, Smooths):
            metrics |= certificate.certify(row, result, policy.noise_std(), certified)
    if served:
        return row
    run = Path(subject.name)
    out = run if node["out"] is None else Path(node["out"])
    if worst is not None:
        write_json(out / task_grid.WORST, worst.to_json())
    if node["policy"] != read_saved(checkpoint.find(path) / "policy.yaml"):
        row["policy"] = policy.node
    _add_line(run / "evaluations.jsonl", row)
    run_report.write(run)
    if node["out"] is not None:
        scores = {f"eval/{name}": value for name, value in metrics.items()}
        _add_line(out / "metrics.jsonl", {"step": subject.step, **scores})
    return row


def evaluated(subject: Subject, chooses: bool = False) -> tuple[Evaluation, Policy]:
    """The result of a policy in its environment, and the policy; where the environment has held-out
    tasks, those are the episodes, unless the result `chooses` what is reported."""
    node = subject.node
    episodes = node["episodes"]
    with closing(subject.open_env(episodes)) as opened:
        env, episodes = (opened, episodes) if chooses else task_grid.exam(opened, episodes)
        if env is not opened and node.get("certify", {}).get("radii"):
            raise ConfigError("certify.radii: held-out tasks are no random sample of episodes")
        policy, shown = subject.make(env.spec), counting(episodes)
        return evaluate(policy, env, episodes, node["seed"], subject.execute, shown), policy


def _certificate_config(node: Node) -> certificate.Config:
    """The certificates that the settings of `embodied eval` ask for; ConfigError where the policy
    or the evaluation has none."""
    config = parse(certificate.Config, node["certify"], "certify")
    if not config.radii:
        return config
    node["policy"] = policy = complete(node["policy"])
    if not issubclass(kind_of(policy, Policy), Smooths) or not policy["sigma"]:
        raise ConfigError("certify.radii: only policy=smoothed with policy.sigma above 0 has them")
    if policy["attack"] != "none":
        raise ConfigError("certify.radii: certificates are of episodes without policy.attack")
    if _asks_worst(node):
        raise ConfigError("certify.radii: not with worst_case=true")
    return config


def _asks_worst(node: Node) -> bool:
    return typed(bool, node["worst_case"], "worst_case")


def _worst_of(subject: Subject) -> tuple[task_grid.WorstCase, Policy]:
    """The worst parameters of its environment for a policy, and the policy."""
    node = subject.node
    config = parse(task_grid.Config, node["search"], "search")
    with closing(subject.open_env(config.episodes)) as env:
        policy, each = subject.make(env.spec), config.episodes
        shown = counting(task_grid.points_of(env, config) * each)
        found = task_grid.worst_case(
            policy,
            env,
            config,
            node["episodes"],
            node["seed"],
            subject.execute,
            lambda points: shown(points * each),
        )
        return found, policy


def _add_line(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as sink:
        sink.write(json.dumps(row) + "\n")


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
    names = ["score", *result.achievements] if result.achievements else []
    facts = result.metrics()
    return row | {name: facts[name] for name in names}


def _imagined_beside(subject: Subject, result: Evaluation) -> dict[str, float]:
    """The imagined success of a run in a model at its last evaluation, as `imagined`, for a policy
    that was just evaluated in a real environment; a warning where the two have parted."""
    known = [row for row in read_metrics(Path(subject.name)) if "eval/imagined_success" in row]
    at = [row for row in known if row["step"] <= subject.step]
    if result.success is None or not at:
        return {}
    imagined = float(at[-1]["eval/imagined_success"])
    if line := parted({**result.metrics(), "imagined_success": imagined}):
        print(f"embodied: {line}", file=sys.stderr, flush=True)
    return {"imagined": imagined}


def print_table(rows: list[dict[str, Any]]) -> None:
    more = {"imagined": "{:.0%}", "score": "{:.2f}"}
    more = {key: form for key, form in more.items() if any(key in row for row in rows)}
    lines: list[list[str]] = []
    for row in rows:
        known = "successes" in row
        other = f" ({row['policy']['_target_'].rpartition('.')[2]})" if "policy" in row else ""
        lines.append(
            [
                row["run"] + other,
                f"{row['step']:,}",
                rate(row["successes"], row["episodes"]) if known else "-",
                *(form.format(row[key]) if key in row else "-" for key, form in more.items()),
                f"{row['return']:,.2f}",
                f"{row['length']:.1f}",
                str(row["episodes"]),
            ]
        )
    print_rows(["run", "step", "success [95%]", *more, "return", "length", "episodes"], lines)
