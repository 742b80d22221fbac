"""Evidence: comparisons of a method with its baseline over seeds, each study a YAML file.

    python -m embodied.evidence [STUDY ...]      (default: all of studies/)

The studies of this project (`embodied.study`); `embodied study FILE` runs anybody's. Results are
written to `docs/evidence/STUDY.json`, the table to `docs/evidence.md`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from embodied.core.build import nearest
from embodied.core.checkpoint import git_revision
from embodied.evaluation.statistics import bootstrap_interval, iqm
from embodied.study.study import Study, cores, finished, read_study, run, scores_of, seconds_of

ROOT = Path(__file__).resolve().parent.parent
STUDIES = ROOT / "studies"
TABLE = ROOT / "docs" / "evidence.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = sorted(path.stem for path in STUDIES.glob("*.yaml"))
    parser.add_argument("studies", nargs="*", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--work", type=Path, default=Path("outputs/evidence"))
    parser.add_argument("--workers", type=int, default=cores())
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
