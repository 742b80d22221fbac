"""Evidence: comparisons of a method with its baseline over seeds, each study a YAML file.

    python -m benchmarks.evidence [STUDY ...]      (default: all of benchmarks/studies/)

The studies of this project (`embodied.study`); `embodied study FILE` runs anybody's. Results are
written to `benchmarks/results/studies/STUDY.json`, the tables to `docs/evidence.md` and, of what is
withdrawn, `docs/evidence_withdrawn.md`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rules
from benchmarks.command import ROOT, put_root_on_path
from benchmarks.curves import read
from embodied.core.build import ConfigError, nearest
from embodied.evaluation.statistics import bootstrap_interval, iqm, probability_of_improvement
from embodied.study.study import Study, cores, is_done, last_value, read_study, run, seconds_of

STUDIES = ROOT / "benchmarks" / "studies"
RESULTS = ROOT / "benchmarks" / "results" / "studies"
TABLE = ROOT / "docs" / "evidence.md"
ARCHIVE = ROOT / "docs" / "evidence_withdrawn.md"
HEAD = """# Evidence

Each method is compared with its own baseline: same steps, same initial states. A cell is the
interquartile mean over seeds, then the score of each seed; the worst seed has a column of its own
(not for a study's further metrics, of which less may be better).
The difference is paired by seed, with its 95% bootstrap interval; P is the probability that a run
of the method scores higher than one of the baseline. Minutes are those of one seed, on one thread
of a shared two-core machine. `bc` is behavior cloning of the same data. SIMULATED: rules or known
rewards in place of a person or a model. BELOW: the interval of the difference says that it is worse
than the baseline, and its learning curve is flat: it gained less than two points over the last
third of the steps. Otherwise "worse, not flat" (it may only have been stopped early), or "worse, no
curve" (it was evaluated once).

The [rules of a fair study](studies.md#rules-of-evidence) are newer than most results; those that
break them are [withdrawn](evidence_withdrawn.md). Seeds alone: fewer than five seeds, or seeds on
which settings may have been chosen, so that no interval is printed. All numbers are kept.
The twelve results to begin with: [what works](what_works.md).

`make evidence` writes this page from `benchmarks/studies/*.yaml` (do not edit it by hand); raw
numbers: `benchmarks/results/studies/`.
"""
WITHDRAWN = """# Withdrawn evidence

These studies lack a fair baseline under the [rules](studies.md#rules-of-evidence), and are no
evidence that a method helps; the reason stands beside each claim. Their numbers are kept, to be
measured again. What stands: [evidence](evidence.md), which says how to read the table.
"""
HEADS = """
| method | task | seeds | baseline | result | worst | difference | min | date, commit |
|---|---|---|---|---|---|---|---|---|"""


def main() -> None:
    put_root_on_path()
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
        study, work = study_of(name), args.work / name
        if not args.finished:
            require_fair(study, name)
            run(study, work, args.workers)
        if seeds := finished(study, work):
            write_down(name, replace(study, seeds=seeds), work)
    write_table()


def study_of(name: str) -> Study:
    return read_study((STUDIES / f"{name}.yaml").read_text(), name)


def require_fair(study: Study, name: str) -> None:
    """ConfigError with every rule (`benchmarks.rules`) that a study breaks, before it runs."""
    found = [*rules.problems(study), *rules.tuning_problems(study), *rules.still_missing(study)]
    if found:
        raise ConfigError(f"study {name} is not fair, nothing was run: " + "; ".join(found))


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
        "curves": curves(study, work),
        "commits": {
            variant: [commit_of(work / f"{variant}-{seed}") for seed in study.seeds]
            for variant in study.variants
        },
        "date": date.today().isoformat(),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print("\n".join(rows(current(name, facts))), flush=True)


def curves(study: Study, work: Path) -> dict[str, Any]:
    """Of each variant that was evaluated more than once: steps [P], minutes [P], scores [S, P]."""
    found = {variant: read(study, work, variant) for variant in study.variants}
    return {
        variant: {
            "steps": curve.steps.tolist(),
            "minutes": np.round(curve.seconds / 60, 2).tolist(),
            "scores": np.round(curve.scores, 4).tolist(),
        }
        for variant, curve in found.items()
        if curve is not None and len(curve.steps) > 1
    }


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
    return [row(each) for each in results] + [row(each, own_metric=False) for each in by_metric]


def row(facts: dict[str, Any], own_metric: bool = True) -> str:
    """One table row: interquartile means over seeds and 95% bootstrap intervals, or, where the
    rules allow none, the seeds alone. Of the study's own metric (`own_metric`) also the worst seed,
    and a verdict on a result that is worse than the baseline: nobody says of a further metric
    whether less of it is better, and `curves` are not of it."""
    base = np.asarray(facts["scores"][facts["baseline"]])
    result = np.asarray(facts["scores"][facts["result"]])
    alone = bool(facts["seeds_alone"])
    compared = f"seeds alone ({facts['seeds_alone']})" if alone else difference(result, base)
    if own_metric and not alone:
        curve = facts.get("curves", {}).get(facts["result"])
        compared += rules.verdict(result - base, curve, facts["direction"])
    worst = result.min() if facts["direction"] == "maximize" else result.max()
    cells = [
        f"WITHDRAWN: {facts['method']}" if facts["withdrawn"] else facts["method"],
        facts["task"],
        str(len(facts["seeds"])),
        f"{facts['baseline']}: {summarize(base, alone)}",
        f"{facts['result']}: {summarize(result, alone)}",
        number(worst) if own_metric else "-",
        compared,
        f"{facts['minutes'][facts['result']]:.1f}",
        f"{facts['date']} {commit(facts)}",
    ]
    return "| " + " | ".join(cells) + " |"


def difference(result: np.ndarray, base: np.ndarray) -> str:
    """The paired difference, and how probably a run of the result scores higher."""
    low, high = bootstrap_interval(result - base)
    higher, least, most = probability_of_improvement(result, base)
    gain = f"{number(iqm(result - base))} [{number(low)}, {number(high)}]"
    return f"{gain}; P {higher:.0%} [{least:.0%}, {most:.0%}]"


def summarize(values: np.ndarray, alone: bool) -> str:
    each = ", ".join(number(v) for v in values)
    return each if alone else f"{number(iqm(values))} ({each})"


def commit(facts: dict[str, Any]) -> str:
    """The commits at which the runs began; for older results that at which they were written."""
    if "commits" not in facts:
        return (facts.get("commit") or "unknown")[:8]
    return " ".join(sorted({each[:8] for runs in facts["commits"].values() for each in runs}))


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def current(name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """A result with what its study's YAML says today: the claim, which may have been narrowed, and
    what the rules say of it. A study that is gone is withdrawn."""
    if not (STUDIES / f"{name}.yaml").exists():
        return facts | {
            "withdrawn": "its study is gone",
            "seeds_alone": "",
            "direction": "maximize",
            "notes": [],
        }
    study = study_of(name)
    return facts | {
        "claim": study.claim,
        "withdrawn": study.withdrawn,
        "seeds_alone": rules.seeds_alone(study, facts["seeds"]),
        "direction": study.direction,
        "notes": notes(study),
    }


def results() -> dict[str, dict[str, Any]]:
    """What is known of every study that has been run, by name."""
    files = sorted(RESULTS.glob("*.json"))
    return {file.stem: current(file.stem, json.loads(file.read_text())) for file in files}


def write_table() -> None:
    """Write docs/evidence.md and docs/evidence_withdrawn.md."""
    TABLE.write_text(table(HEAD, withdrawn=False))
    ARCHIVE.write_text(table(WITHDRAWN, withdrawn=True))


def table(head: str, withdrawn: bool) -> str:
    """The page below `head` of the studies that stand, or of the others, from their JSON."""
    known = {n: f for n, f in results().items() if bool(f["withdrawn"]) == withdrawn}
    lines = [
        head + HEADS,
        *[line for name, f in known.items() for line in linked(name, f)],
        "",
        "## What each study shows, and its limits",
        "",
        *[limits(f) for f in known.values()],
        "",
    ]
    return "\n".join(lines)


def linked(name: str, facts: dict[str, Any]) -> Iterator[str]:
    """The table rows of a study; those of its own metric have an anchor (STUDY, STUDY-VARIANT)."""
    anchors = [name, *[f"{name}-{variant}" for variant in facts.get("also", {})]]
    for anchor, line in zip_longest(anchors, rows(facts)):
        yield f'| <a id="{anchor}"></a>{line[2:]}' if anchor else line


def notes(study: Study) -> list[str]:
    """What a reader of a study's result has to know beside its claim."""
    lacking = [
        f"{'Not yet run again' if role == 'all' else f'Control not yet run, {role}'}: {why}"
        for role, why in study.not_yet_run.items()
    ]
    reasons = ((key, why) for key, why in study.exempt.items() if key.startswith("env."))
    other = [f"{key} is not the task's own: {why}" for key, why in reasons]
    return [*lacking, *other, *([f"Advice: {study.advice}"] if study.advice else [])]


def limits(facts: dict[str, Any]) -> str:
    said = [f"WITHDRAWN: {facts['withdrawn']}"] if facts["withdrawn"] else []
    return " ".join([f"- **{facts['method']}**: {facts['claim']}", *said, *facts["notes"]])


def finished(study: Study, work: Path) -> tuple[int, ...]:
    """The seeds for which every variant is done."""
    return tuple(
        seed for seed in study.seeds if all(is_done(work, v, seed) for v in study.variants)
    )


def scores_of(study: Study, work: Path, metric: str) -> dict[str, list[float]]:
    """Of each variant, the last value of `metric` of each seed."""
    return {
        variant: [last_value(work / f"{variant}-{seed}", metric) for seed in study.seeds]
        for variant in study.variants
    }


def commit_of(out: Path) -> str:
    """The commit of the code when a run began."""
    words = Path(f"{out}.done").read_text().split()
    return words[1] if len(words) > 1 else "unknown"


if __name__ == "__main__":
    main()
