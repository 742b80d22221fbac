"""Evidence: small honest experiments, each a YAML file, run over seeds and written down as a table.

    python -m embodied.evidence [STUDY ...]      (all of studies without names)

A study names its commands; every arm runs once a seed, arms in order (a later one may start from
an earlier one's folder), seeds side by side. What has finished is not run again. Results go to
`docs/evidence/STUDY.json`, the table to `docs/evidence.md`.
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

from embodied.core.build import ConfigError, nearest, parse
from embodied.core.checkpoint import git_revision
from embodied.evaluation.statistics import bootstrap_interval, iqm

ROOT = Path(__file__).resolve().parent.parent
STUDIES = ROOT / "studies"
TABLE = ROOT / "docs" / "evidence.md"


@dataclass(frozen=True)
class Study:
    """One row: `arms` are command lines over {work}, {out}, {seed}; `prepare` runs once before.

    `metric` is read from the last line of each arm's metrics.jsonl that has it. `baseline` and
    `result` name arms; `also`: further arms against the same baseline, and what their rows say of
    the method.
    """

    method: str
    task: str
    claim: str
    metric: str
    seeds: tuple[int, ...]
    arms: dict[str, str]
    baseline: str
    result: str
    prepare: tuple[str, ...] = ()
    also: Mapping[str, str] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = sorted(path.stem for path in STUDIES.glob("*.yaml"))
    parser.add_argument("studies", nargs="*", help=f"of {', '.join(known)}; all without names")
    parser.add_argument("--work", type=Path, default=Path("outputs/evidence"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--finished", action="store_true", help="run nothing: write down the seeds that are done"
    )
    args = parser.parse_args()
    for name in args.studies:
        if name not in known:
            raise SystemExit(f"evidence: no study {name}{nearest(name, known)}")
    for name in args.studies or known:
        study: Study = parse(Study, yaml.safe_load((STUDIES / f"{name}.yaml").read_text()), name)
        work = args.work / name
        if not args.finished:
            run(study, work, args.workers)
        if seeds := finished(study, work):
            write_down(name, replace(study, seeds=seeds), work)
    write_table()


def run(study: Study, work: Path, workers: int) -> None:
    """Run what is missing of a study."""
    work.mkdir(parents=True, exist_ok=True)
    for number, line in enumerate(study.prepare):
        command(line.format(work=work), work / f"prepare-{number}")
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda seed: run_seed(study, work, seed), study.seeds))


def finished(study: Study, work: Path) -> tuple[int, ...]:
    """The seeds of which every arm is done."""
    return tuple(
        seed
        for seed in study.seeds
        if all((work / f"{arm}-{seed}.done").exists() for arm in study.arms)
    )


def write_down(name: str, study: Study, work: Path) -> None:
    """Write a study's JSON."""
    scores = {
        arm: [last(work / f"{arm}-{seed}", study.metric) for seed in study.seeds]
        for arm in study.arms
    }
    minutes = {
        arm: float(np.median([took(work / f"{arm}-{seed}") for seed in study.seeds])) / 60
        for arm in study.arms
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
        "commit": git_revision(),
        "date": date.today().isoformat(),
    }
    folder = TABLE.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print("\n".join(rows(facts)), flush=True)


def run_seed(study: Study, work: Path, seed: int) -> None:
    for arm, line in study.arms.items():
        out = work / f"{arm}-{seed}"
        command(line.format(work=work, out=out, seed=seed), out)


def command(line: str, out: Path) -> None:
    """Run a command line once; `OUT.log` keeps what it printed, `OUT.done` the seconds it took."""
    done = Path(f"{out}.done")
    if done.exists():
        return
    print(line, flush=True)
    words = shlex.split(line)
    if words[0] in ("python", "embodied"):
        words[0] = str(Path(sys.executable).with_name(words[0]))
    shutil.rmtree(out, ignore_errors=True)  # of a run that did not end
    began = time.perf_counter()
    with Path(f"{out}.log").open("w") as log:
        code = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        raise ConfigError(f"evidence: `{line}` failed with {code}; see {out}.log")
    done.write_text(f"{time.perf_counter() - began:.1f}\n")


def last(folder: Path, metric: str) -> float:
    """The last value of `metric` in a run's metrics."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    values = [r[metric] for r in map(json.loads, lines) if metric in r]
    if not values:
        raise ConfigError(f"evidence: {folder}/metrics.jsonl never has {metric}")
    return float(values[-1])


def took(out: Path) -> float:
    return float(Path(f"{out}.done").read_text())


def rows(facts: dict[str, Any]) -> list[str]:
    """The line of a study's result, and one for each of its other methods."""
    others = facts.get("also", {}).items()
    return [row(facts), *[row({**facts, "result": arm, "method": name}) for arm, name in others]]


def row(facts: dict[str, Any]) -> str:
    """One line of the table: interquartile means over seeds, 95% bootstrap intervals."""
    base = np.asarray(facts["scores"][facts["baseline"]])
    result = np.asarray(facts["scores"][facts["result"]])
    gain = result - base
    low, high = bootstrap_interval(gain)
    cells = [
        facts["method"],
        facts["task"],
        str(len(facts["seeds"])),
        f"{facts['baseline']}: {shown(base)}",
        f"{facts['result']}: {shown(result)}",
        f"{number(iqm(gain))} [{number(low)}, {number(high)}]",
        f"{facts['minutes'][facts['result']]:.1f}",
        f"{facts['date']} {(facts['commit'] or 'unknown')[:8]}",
    ]
    return "| " + " | ".join(cells) + " |"


def shown(values: np.ndarray) -> str:
    each = ", ".join(number(v) for v in values)
    return f"{number(iqm(values))} ({each})"


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def said(name: str) -> dict[str, str]:
    """What a study says today of what it shows: that may be less than when it was run."""
    file = STUDIES / f"{name}.yaml"
    return {"claim": yaml.safe_load(file.read_text())["claim"]} if file.exists() else {}


def write_table() -> None:
    """Make docs/evidence.md from the JSON of every study."""
    studies = sorted(TABLE.with_suffix("").glob("*.json"))
    facts = [json.loads(path.read_text()) | said(path.stem) for path in studies]
    lines = [
        "# Evidence",
        "",
        "Each method against its own baseline, same steps, same starts; interquartile mean over",
        "seeds, then every seed's score. The difference is paired by seed, with its 95% bootstrap",
        "interval. Minutes are one seed's, on one thread of a shared two-core machine.",
        "Made by `make evidence` from `studies/*.yaml`; raw numbers in `docs/evidence/`.",
        "",
        "| method | task | seeds | baseline | result | difference | min | date, commit |",
        "|---|---|---|---|---|---|---|---|",
        *[line for f in facts for line in rows(f)],
        "",
        "## What each row claims",
        "",
        *[f"- **{f['method']}**: {f['claim']}" for f in facts],
        "",
    ]
    TABLE.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
