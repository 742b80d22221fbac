"""The page of results: a plot of every study of benchmarks/results that is not withdrawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import evidence
from embodied.evaluation.statistics import bootstrap_interval, iqm, probability_of_improvement
from embodied.reports.page import chart
from embodied.study.page import intervals, profiles

Facts = Mapping[str, Any]

KINDS = {
    "improvement": "Improvements of a base policy or from recorded data",
    "comparison": "Two ways to learn",
    "reproduction": "Beside another implementation",
}
STYLE = """<style>
.results { --main: #0b6bcb; --second: #c2410c; --third: #15803d; --fourth: #7e22ce;
  --fifth: #a16207; --sixth: #0e7490; max-width: 620px; }
.results svg { display: block; width: 100%; height: auto; }
.results text { font-size: 11px; fill: currentColor; }
.results .y { text-anchor: end; } .results .x { text-anchor: middle; }
.results .grid { stroke: currentColor; opacity: .15; }
.results .line { fill: none; stroke: var(--main); stroke-width: 2; }
.results .dot { fill: var(--main); }
.results .whisker { stroke: var(--main); stroke-width: 5; opacity: .25; }
.results .legend { display: flex; flex-wrap: wrap; gap: 0 16px; font-size: 13px; margin: 4px 0; }
</style>"""
HEAD = """# Results

{drawn} studies in plots, drawn from the files of the [table of evidence](evidence.md).
The table says what each of them shows and where it ends. {withdrawn} others are
[withdrawn](evidence_withdrawn.md) and are not drawn.

A small dot is one run (one seed). Where the rules allow an interval, the bar is the 95% bootstrap
interval of the interquartile mean, which is the large dot; otherwise the runs stand alone: from
fewer than five seeds, or from seeds on which settings may have been chosen, no interval follows.
`python -m benchmarks.evidence STUDY` runs one of them again; the minutes are those of all of its
runs, on one thread of a two-core machine.
"""
WORKS = {
    "demo": ("DSRL: RL of the noise of a frozen flow policy", "bc", "best_sampler"),
    "demo_own_successes": ("Cloning of the policy's own successes", "bc", "best_sampler"),
    "finetuners_insert": ("Residual SAC on an imprecise policy", "best_sampler", "dppo"),
    "sindy_pendulum": ("A policy trained in equations", "real_2000_best", "ensemble"),
    "lerobot_diffusion": ("DSRL on a Diffusion policy that LeRobot trained", "base", "cloning"),
    "metaworld_offline": ("IQL, from recorded data of mixed quality", "bc", "top_5000"),
    "flow": ("Flow policies keep both modes of demonstrations", "regression", ""),
    "rewind": ("ReWiND: a reward of progress, learned from 10 demonstrations", "sparse", "bc"),
    "rnd": ("RND: exploration where nothing is rewarded before the goal", "none", ""),
    "reach_teachers": (
        "ALP-GMM chooses goals, of which an eighth is in reach",
        "uniform",
        "adr",
    ),
    "mpts_quadrotor": ("MPTS: training for the worst tenth of drones", "uniform", ""),
    "recurrent": ("PPO with memory, where velocities are not seen", "feedforward", ""),
}
"""Twelve results to begin with: in words, the plain variant, the strongest other way measured."""
WORKS_HEAD = """# What works

Twelve results that stand under the [rules of a fair study](studies.md#rules-of-evidence), drawn
from the files of the [evidence](evidence.md). A number is the interquartile mean over seeds;
*strongest other way* is the best control of the same study, which often is worth trying first.

| result | without | strongest other way | with it |
|---|---|---|---|
"""
WORKS_FOOT = """
Tasks, controls and limits are in the [plots](results.md) and the [evidence](evidence.md).
None of these was measured on a real robot. What did not help is there too, and what
lacks a fair comparison is [withdrawn](evidence_withdrawn.md).

How these come together in one command: [improve a policy](improve.md). Which to take:
[decision tree](howto/choose.md).
"""
NONE = "No study stands today: all of them are withdrawn until they are run with fair baselines."


def page() -> str:
    """The page as Markdown with inline SVG."""
    every = evidence.results()
    drawn = {name: facts for name, facts in every.items() if not facts["withdrawn"]}
    lines = [STYLE, "", HEAD.format(drawn=len(drawn), withdrawn=len(every) - len(drawn))]
    lines += ["## Probability of improvement", "", *improvements(drawn)]
    for kind, title in KINDS.items():
        lines += ["", f"## {title}", ""]
        ours = [name for name in drawn if evidence.study_of(name).kind == kind]
        lines += [line for name in ours for line in section(name, drawn[name])] or [NONE]
    return "\n".join(lines) + "\n"


def works() -> str:
    """The page of the results to begin with."""
    every = evidence.results()
    lines = [line for name, each in WORKS.items() for line in work(every[name], *each)]
    return WORKS_HEAD + "\n".join(lines) + "\n" + WORKS_FOOT


def work(facts: Facts, says: str, base: str, other: str) -> Iterator[str]:
    """A line of the table. ValueError for a result that does not stand."""
    if facts["withdrawn"]:
        raise ValueError(f"{facts['method']} is withdrawn: leave it out of WORKS")
    score = {v: evidence.number(iqm(s)) for v, s in facts["scores"].items()}
    best = f"{score[other]} (`{other}`)" if other else "-"
    about = f"{says} (`{facts['metric']}`, {len(facts['seeds'])} seeds)"
    ours = f"**{score[facts['result']]}**"
    yield f"| {about} | {score[base]} (`{base}`) | {best} | {ours} |"


def improvements(drawn: Mapping[str, Facts]) -> Iterator[str]:
    """Of the studies that may have an interval: how probably a run beats one of the baseline."""
    found = {}
    for name, facts in drawn.items():
        if not facts["seeds_alone"]:
            pair = [facts["scores"][facts[side]] for side in ("result", "baseline")]
            ours, base = pair if facts["direction"] == "maximize" else pair[::-1]
            higher, low, high = probability_of_improvement(ours, base)
            found[name] = {"scores": [], "iqm": higher, "interval": (low, high)}
    yield "How probably a run of the method is better than one of its baseline, with its 95%"
    yield "bootstrap interval; at 0.5 they cannot be told apart."
    yield from ("", figure(intervals(found)))


def section(name: str, facts: Facts) -> Iterator[str]:
    """One study: its runs and, with an interval, its performance profile."""
    allowed = not facts["seeds_alone"]
    variants = {
        variant: {"scores": scores} | (summary(scores) if allowed else {})
        for variant, scores in facts["scores"].items()
    }
    minutes = sum(facts["minutes"].values()) * len(facts["seeds"])
    yield from (f"### {facts['method']}", "", f"{facts['task']}. Metric: `{facts['metric']}`.")
    yield f"Baseline `{facts['baseline']}`, result `{facts['result']}`; study `{name}`,"
    yield f"{minutes:.0f} minutes."
    if not allowed:
        yield f"Runs alone: {facts['seeds_alone']}."
    yield from ("", figure(intervals(variants)), "")
    if allowed:
        yield from ("Share of runs above a score:", "")
        yield from (figure(chart(profiles(variants), "share of runs")), "")
    if curves := facts.get("curves"):
        yield from ("Interquartile mean by environment steps or updates, and by minutes:", "")
        for unit in ("steps", "minutes"):
            yield from (figure(chart(training(curves, unit), facts["metric"])), "")


def training(curves: Mapping[str, Any], unit: str) -> dict[str, list[tuple[float, float]]]:
    """Of each variant the interquartile mean over seeds at each evaluation."""
    return {
        variant: [
            (at, iqm(scores))
            for at, scores in zip(curve[unit], zip(*curve["scores"], strict=True), strict=True)
        ]
        for variant, curve in curves.items()
    }


def summary(scores: list[float]) -> dict[str, Any]:
    return {"iqm": iqm(scores), "interval": bootstrap_interval(scores)}


def figure(drawn: str) -> str:
    return f'<div class="results">{drawn}</div>'
