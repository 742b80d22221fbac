"""Evidence: comparisons of a method with its baseline over seeds, each study a YAML file.

    python -m embodied.evidence [STUDY ...]      (default: all of studies/)

A study names command lines, its variants. Each variant runs once per seed: variants in order (a
later one may continue from an earlier one's folder), seeds in parallel. Finished runs are not
repeated. Results are written to `docs/evidence/STUDY.json`, the table to `docs/evidence.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from embodied import moved
from embodied.core.build import ConfigError, nearest, parse
from embodied.core.checkpoint import git_revision
from embodied.evaluation.statistics import bootstrap_interval, iqm

ROOT = Path(__file__).resolve().parent.parent
STUDIES = ROOT / "studies"
TABLE = ROOT / "docs" / "evidence.md"


@dataclass(frozen=True)
class Study:
    """One study, a row of the table.

    `variants` are command lines with the fields {work}, {out} and {seed}; `prepare` lines run once
    before. `metric` is read from the last line of each variant's metrics.jsonl that has it.
    `baseline` and `result` name variants; `also` names further variants that are compared with the
    same baseline, with the method's name in the table. `further_metrics` are read and compared in
    the same way, each in rows of its own.
    """

    method: str
    task: str
    claim: str
    metric: str
    seeds: tuple[int, ...]
    variants: dict[str, str]
    baseline: str
    result: str
    prepare: tuple[str, ...] = ()
    also: Mapping[str, str] = field(default_factory=dict)
    further_metrics: tuple[str, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = sorted(path.stem for path in STUDIES.glob("*.yaml"))
    parser.add_argument("studies", nargs="*", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--work", type=Path, default=Path("outputs/evidence"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--finished", action="store_true", help="run nothing; write the results of finished seeds"
    )
    args = parser.parse_args()
    for name in args.studies:
        if name not in known:
            raise SystemExit(f"evidence: unknown study {name}{nearest(name, known)}")
    for name in args.studies or known:
        study = read_study((STUDIES / f"{name}.yaml").read_text(), name)
        work = args.work / name
        if not args.finished:
            run(study, work, args.workers)
        if seeds := finished(study, work):
            write_down(name, replace(study, seeds=seeds), work)
    write_table()


def read_study(text: str, name: str) -> Study:
    """Parse a study; the former key `arms` is still accepted, with a warning."""
    node = yaml.safe_load(text)
    if "arms" in node and "variants" not in node:
        moved.warn(f"the key arms of study {name}", "variants")
        node["variants"] = node.pop("arms")
    return parse(Study, node, name)


def run(study: Study, work: Path, workers: int) -> None:
    """Run what is missing of a study."""
    work.mkdir(parents=True, exist_ok=True)
    for number, line in enumerate(study.prepare):
        command(line.format(work=work), work / f"prepare-{number}")
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda seed: run_seed(study, work, seed), study.seeds))


def finished(study: Study, work: Path) -> tuple[int, ...]:
    """The seeds for which every variant is done."""
    return tuple(
        seed
        for seed in study.seeds
        if all((work / f"{variant}-{seed}.done").exists() for variant in study.variants)
    )


def write_down(name: str, study: Study, work: Path) -> None:
    """Write a study's JSON and print its rows."""
    scores = scores_of(study, work, study.metric)
    minutes = {
        variant: float(np.median([seconds_of(work / f"{variant}-{seed}") for seed in study.seeds]))
        / 60
        for variant in study.variants
    }
    facts: dict[str, Any] = {
        "method": study.method,
        "task": study.task,
        "claim": study.claim,
        "metric": study.metric,
        "seeds": list(study.seeds),
        "baseline": study.baseline,
        "result": study.result,
        "scores": scores,
        "minutes": minutes,
        "also": dict(study.also),
        "further": {each: scores_of(study, work, each) for each in study.further_metrics},
        "commit": git_revision(),
        "date": date.today().isoformat(),
    }
    folder = TABLE.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print("\n".join(rows(facts)), flush=True)


def scores_of(study: Study, work: Path, metric: str) -> dict[str, list[float]]:
    """Of each variant, the last value of `metric` of each seed."""
    return {
        variant: [last_value(work / f"{variant}-{seed}", metric) for seed in study.seeds]
        for variant in study.variants
    }


def run_seed(study: Study, work: Path, seed: int) -> None:
    for variant, line in study.variants.items():
        out = work / f"{variant}-{seed}"
        command(line.format(work=work, out=out, seed=seed), out)


def command(line: str, out: Path) -> None:
    """Run a command line once; OUT.log keeps its output, OUT.done the seconds it took."""
    done = Path(f"{out}.done")
    if done.exists():
        return
    print(line, flush=True)
    words = shlex.split(line)
    if words[0] in ("python", "embodied"):
        words[0] = str(Path(sys.executable).with_name(words[0]))
    shutil.rmtree(out, ignore_errors=True)  # of an interrupted run
    start = time.perf_counter()
    with Path(f"{out}.log").open("w") as log:
        code = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        raise ConfigError(f"evidence: `{line}` failed with {code}; see {out}.log")
    done.write_text(f"{time.perf_counter() - start:.1f}\n")


def last_value(folder: Path, metric: str) -> float:
    """The last value of `metric` in a run's metrics."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    values = [r[metric] for r in map(json.loads, lines) if metric in r]
    if not values:
        raise ConfigError(f"evidence: {folder}/metrics.jsonl has no {metric}")
    return float(values[-1])


def seconds_of(out: Path) -> float:
    return float(Path(f"{out}.done").read_text())


def rows(facts: dict[str, Any]) -> list[str]:
    """The table rows of a study: its result, and one per further method, for each metric."""
    others = facts.get("also", {}).items()
    results = [facts, *[{**facts, "result": name, "method": says} for name, says in others]]
    further = facts.get("further", {}).items()
    by_metric = [
        {**each, "scores": scores, "task": f"the same; {metric}"}
        for metric, scores in further
        for each in results
    ]
    return [row(each) for each in [*results, *by_metric]]


def row(facts: dict[str, Any]) -> str:
    """One table row: interquartile means over seeds with 95% bootstrap intervals."""
    base = np.asarray(facts["scores"][facts["baseline"]])
    result = np.asarray(facts["scores"][facts["result"]])
    gain = result - base
    low, high = bootstrap_interval(gain)
    cells = [
        facts["method"],
        facts["task"],
        str(len(facts["seeds"])),
        f"{facts['baseline']}: {summarize(base)}",
        f"{facts['result']}: {summarize(result)}",
        f"{number(iqm(gain))} [{number(low)}, {number(high)}]",
        f"{facts['minutes'][facts['result']]:.1f}",
        f"{facts['date']} {(facts['commit'] or 'unknown')[:8]}",
    ]
    return "| " + " | ".join(cells) + " |"


def summarize(values: np.ndarray) -> str:
    each = ", ".join(number(v) for v in values)
    return f"{number(iqm(values))} ({each})"


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def current_claim(name: str) -> dict[str, str]:
    """The claim in the study's YAML file, which may have been narrowed since it was run."""
    file = STUDIES / f"{name}.yaml"
    return {"claim": yaml.safe_load(file.read_text())["claim"]} if file.exists() else {}


def write_table() -> None:
    """Generate docs/evidence.md from the JSON of every study."""
    studies = sorted(TABLE.with_suffix("").glob("*.json"))
    facts = [json.loads(path.read_text()) | current_claim(path.stem) for path in studies]
    lines = [
        "# Evidence",
        "",
        "Each method is compared with its own baseline: same steps, same initial states. A cell is",
        "the interquartile mean over seeds, then the score of each seed. The difference is paired",
        "by seed, with its 95% bootstrap interval. Minutes are those of one seed, on one thread of",
        "a shared two-core machine. `bc` is behavior cloning of the same data. BELOW: worse than",
        "the baseline. SIMULATED: rules or known rewards in place of a person or a model.",
        "",
        "`make evidence` writes this page from `studies/*.yaml`; raw numbers: `docs/evidence/`.",
        "",
        "| method | task | seeds | baseline | result | difference | min | date, commit |",
        "|---|---|---|---|---|---|---|---|",
        *[line for f in facts for line in rows(f)],
        "",
        "## What each study shows, and its limits",
        "",
        *[f"- **{f['method']}**: {f['claim']}" for f in facts],
        "",
    ]
    TABLE.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
