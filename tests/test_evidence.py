"""The evidence runner: every study is well formed, runs what is missing, and counts right."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks import evidence, rules
from benchmarks.evidence import commit_of, finished
from embodied import cli
from embodied.compose import PACKAGED, options
from embodied.core.build import ConfigError, parse
from embodied.evaluation.statistics import iqm
from embodied.study.study import Study, filled, read_study, run, seconds_of
from tests.tiers import usually

FAIR: dict[str, Any] = {
    "metric": "eval/success",
    "seeds": [1, 2, 3, 4, 5],
    "tuning_seeds": [0],
    "kind": "improvement",
    "variants": {
        "bc": "experiment=pendulum_bc demos={work}/demos",
        "best_third": "experiment=pendulum_bc weighting=top demos={work}/demos",
        "sampler": "embodied eval {work}/bc-{seed} execute=1 out={out}",
        "sac": "experiment=pendulum_sac steps=4000",
        "without": "experiment=pendulum_sac steps=4000 learner.gamma=0.9",
    },
    "controls": dict(filtered_cloning="best_third", best_sampler="sampler", without_part="without"),
}


def fair(**changes: object) -> Study:
    return parse(Study, {**FAIR, **changes}, "fair")


def test_a_fair_study_breaks_no_rule() -> None:
    assert list(rules.problems(fair())) == [] and rules.tuning_problems(fair()) == []
    assert rules.seeds_alone(fair(), fair().seeds) == ""
    steps = [rules.env_steps(fair(), name) for name in fair().variants]
    assert steps == [0, 0, 0, 4000, 4000]


@pytest.mark.parametrize("role", rules.CONTROLS)
def test_a_control_that_is_missing_is_named(role: str) -> None:
    fewer = {key: value for key, value in FAIR["controls"].items() if key != role}
    (line,) = rules.problems(fair(controls=fewer))
    assert role in line
    for excuse in ("exempt", "not_yet_run"):
        assert list(rules.problems(fair(controls=fewer, **{excuse: {role: "why"}}))) == []


def test_unequal_budgets_unknown_variants_and_kinds_are_named() -> None:
    more = FAIR["variants"] | {"sac": "experiment=pendulum_sac steps=5000"}
    assert "sac 5,000, without 4,000" in next(rules.problems(fair(variants=more)))
    unknown = FAIR["controls"] | {"best_sampler": "nobody"}
    assert "nobody" in next(rules.problems(fair(controls=unknown)))
    assert "kind" in next(rules.problems(fair(kind="")))


# A base policy in `two_gap`, which has 50 steps, and what is compared with it.
GAP: dict[str, Any] = {
    "controls": {role: "eval" for role in rules.CONTROLS},
    "variants": {
        "bc": "experiment=two_gap_flow policy.chunk=4 env.num_envs=8 demos={work}/demos",
        "eval": "embodied eval {work}/bc-{seed} execute=4 out={out}",
    },
}


def gap(more: dict[str, str], **changes: object) -> list[str]:
    """The problems of that study with `more` variants."""
    return list(rules.problems(fair(**{**GAP, "variants": {**GAP["variants"], **more}, **changes})))


def test_an_environment_that_is_not_the_tasks_own_needs_a_reason() -> None:
    """Of every variant, also of an evaluation of a run that was trained in another one."""
    assert gap({}) == []
    short = {"bc": GAP["variants"]["bc"] + " env.horizon=26"}
    (line,) = gap(short)
    assert "env.horizon" in line and "bc 26, eval 26" in line
    assert gap(short, exempt={"env.horizon": "why"}) == []
    own = "embodied eval {work}/bc-{seed} env.horizon=50 out={out}"
    assert gap({**short, "eval": own}) == [line.replace(", eval 26", "")]
    assert "env.gaps" in gap({"closed": "experiment=two_gap_flow env.gaps=[0.75]"})[0]
    prepared = ["embodied adopt {work}/theirs env=two_gap env.horizon=26 out={work}/adopted"]
    adopted = {"adopted": "embodied eval {work}/adopted out={out}"}
    assert "adopted 26" in gap(adopted, prepare=prepared)[0]
    stage = {"name": "base", "run": "experiment=two_gap_flow demos=DIR env.horizon=26"}
    of_stage = {"of_stage": "embodied eval {base.out} execute=1 out={out}"}
    assert "of_stage 26" in gap(of_stage, stages=[stage])[0]


def test_steering_by_noise_needs_the_best_fixed_noise_as_a_control() -> None:
    steered = {"dsrl": "experiment=two_gap_dsrl env.gaps=[0.25,0.75] init={work}/bc-{seed}"}
    (line,) = gap(steered, result="dsrl")
    assert "best_fixed_noise" in line
    found = GAP["controls"] | {rules.NOISE: "eval"}
    assert gap(steered, result="dsrl", controls=found) == []
    later = {rules.NOISE: "when the search is built"}
    assert gap(steered, result="dsrl", not_yet_run=later) == []
    promised = fair(not_yet_run=later)
    assert "best_fixed_noise" in rules.still_missing(promised)[0]
    with pytest.raises(ConfigError, match="best_fixed_noise"):
        evidence.require_fair(promised, "promised")


def test_the_control_of_iql_is_iql_whose_advantages_do_not_weigh() -> None:
    words = "env=two_gap policy=deterministic learner=iql demos={work}/demos"
    variants = {"iql": words, "bc_weights": words + " learner.beta=0"}
    controls = {**GAP["controls"], "without_part": "bc"}
    assert "learner.beta=0" in gap(variants, result="iql", controls=controls)[0]
    assert gap(variants, result="iql", controls=controls | {"without_part": "bc_weights"}) == []


def test_advice_needs_every_fine_tuner_with_the_same_inputs() -> None:
    assert set(options("finetune", [PACKAGED])) <= rules.INPUTS.keys()
    start = "env=two_gap policy=gaussian learner=sac init={work}/bc-{seed} finetune="
    variants = {"dsrl": start + "dsrl", "residual": start + "residual"}
    settings = {"result": "residual", "not_yet_run": {rules.NOISE: "why"}}
    assert gap(variants, **settings) == []
    (line,) = gap(variants, advice="Take residual.", **settings)
    assert "dsrl_na, ticket, reinflow" in line  # of a flow; neither demonstrations nor images
    excused = {name: "why" for name in ("dsrl_na", "ticket", "reinflow")}
    assert gap(variants, advice="Take residual.", exempt=excused, **settings) == []


def test_a_result_is_below_only_once_its_curve_is_flat() -> None:
    worse, steps = np.full(5, -0.3), [1.0, 2.0, 3.0]
    rising = {"steps": steps, "scores": [[0.1, 0.3, 0.33]] * 5}
    settled = {"steps": steps, "scores": [[0.1, 0.3, 0.31]] * 5}
    assert rules.verdict(worse, settled, "maximize") == "; BELOW"
    assert rules.verdict(worse, rising, "maximize") == "; worse, not flat"
    assert rules.verdict(worse, None, "maximize") == "; worse, no curve"
    assert rules.verdict(-worse, rising, "minimize") == "; BELOW"  # it gets worse
    # Two points are of 100% for a share that is to be small, too, not of its curve's range.
    slow = {"steps": [1, 2, 3], "scores": [[0.2, 0.11, 0.1]] * 5}
    assert rules.verdict(-worse, slow, "minimize") == "; BELOW"
    mixed = np.array([-0.3, 0.2, -0.1, 0.3, 0.1])
    for differences in (-worse, mixed):
        assert rules.verdict(differences, settled, "maximize") == ""
    for last, flat in ((-290.0, True), (-270.0, False)):  # 10 of 1,210 are less than 2%
        returns = np.array([[-1500.0, -300.0, last]] * 2)
        assert rules.flat(np.array(steps), returns) is flat


def test_intervals_need_five_seeds_on_which_nothing_was_chosen() -> None:
    assert rules.seeds_alone(fair(), (1, 2, 3, 4)) == "4 seeds"
    assert "not recorded" in rules.seeds_alone(fair(tuning_seeds=None), (1, 2, 3, 4, 5))
    chosen = fair(tuning_seeds=[2])
    assert "chosen" in rules.seeds_alone(chosen, chosen.seeds)
    older = fair(tuning_seeds=[7, 8])  # named after the result was stored
    assert "chosen" in rules.seeds_alone(older, (1, 2, 3, 4, 7))
    assert "reported seeds: [2]" in rules.tuning_problems(chosen)[0]


def test_an_unfair_study_is_not_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"study mine is not fair.*filtered_cloning"):
        evidence.require_fair(fair(controls={}), "mine")


STUDIES = sorted(evidence.STUDIES.glob("*.yaml"))
# The commands of a comparison of two ways to learn, which has no control, are composed with
# `--all`: there are 150, at a tenth of a second each.
CONTROLLED = {file for file in STUDIES if "\nkind: improvement\n" in file.read_text()}


@pytest.mark.parametrize("file", usually(CONTROLLED, STUDIES), ids=lambda file: file.stem)
def test_a_study_is_fair_or_withdrawn(file: Path) -> None:
    """And one that was mended is withdrawn no longer."""
    study = evidence.study_of(file.stem)
    unfair, again = next(rules.problems(study), None), "all" in study.not_yet_run
    assert bool(study.withdrawn) == (unfair is not None or again)
    assert not (unfair and again)  # its commands are mended, its result is not


def test_the_page_says_what_the_rules_say() -> None:
    """`python -m benchmarks.evidence --finished` writes it."""
    assert evidence.TABLE.read_text() == evidence.table(evidence.HEAD, withdrawn=False)
    assert evidence.ARCHIVE.read_text() == evidence.table(evidence.WITHDRAWN, withdrawn=True)
    for file in evidence.RESULTS.glob("*.json"):
        facts = evidence.current(file.stem, json.loads(file.read_text()))
        for line in evidence.rows(facts):
            assert line.startswith("| WITHDRAWN: ") == bool(facts["withdrawn"])
            few = len(facts["seeds"]) < rules.MIN_SEEDS
            assert not few or ("seeds alone" in line and "[" not in line.split(" | ")[6])


def test_pages_advise_and_judge_only_in_the_words_of_the_studies() -> None:
    studies = [evidence.study_of(file.stem) for file in STUDIES]
    page = (evidence.ROOT / "docs" / "finetuning.md").read_text()
    advice = [study.advice for study in studies if study.advice and not study.withdrawn]
    assert all(text in page for text in advice)
    assert advice or "**Which to take is not known**" in page
    assert not [study.method for study in studies if "BELOW" in study.claim]
    pages = {evidence.ROOT / "README.md", *(evidence.ROOT / "docs").rglob("*.md")}
    written = {page.name for page in pages if re.search(r"\bBELOW\b", page.read_text())}
    assert written <= {evidence.TABLE.name, evidence.ARCHIVE.name, "studies.md"}


def figure(score: float) -> str:
    """A pattern of a score as pages write it: 98%, .98 or 0.98; -205; not in a list of seeds."""
    if abs(score) > 1:
        return rf"{score:.0f}\b"
    share = re.escape(f"{score:.2f}".removeprefix("0").removesuffix("0"))
    return rf"\b{100 * score:.0f}%(?! interval|\])|(?<!\d)(?<!\d, )0?{share}0?\b(?!, \d)"


def blocks(page: Path) -> list[str]:
    """Rows of tables, items of lists and paragraphs."""
    return re.split(r"\n(?=\s*[|-])|\n\n", page.read_text())


def test_no_page_quotes_a_withdrawn_result() -> None:
    """A result is quoted where its method is named beside its score, unless the same block says
    that it is withdrawn. (lerobot.md has results on an adopted policy, which is no study.)"""
    pages = [evidence.ROOT / "README.md", *(evidence.ROOT / "docs").rglob("*.md")]
    without = (evidence.TABLE, evidence.ARCHIVE, evidence.ROOT / "docs" / "lerobot.md")
    written = {page: blocks(page) for page in pages if page not in without}
    quoted = []
    for file in evidence.RESULTS.glob("*.json"):
        facts = evidence.current(file.stem, json.loads(file.read_text()))
        if not facts["withdrawn"]:
            continue
        method = re.escape(re.split(r"[ ,=]", facts["method"])[0])
        score = figure(iqm(facts["scores"][facts["result"]]))
        quoted += [
            f"{page.name}: {file.stem}: {block.strip()[:300]}"
            for page, parts in written.items()
            for block in parts
            if re.search(rf"\b{method}", block, re.IGNORECASE)
            and re.search(score, block)
            and "withdrawn" not in block.lower()
        ]
    assert not quoted, "\n".join(quoted)


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_studies_are_well_formed(file: Path) -> None:
    study = read_study(file.read_text(), file.stem)
    assert {study.baseline, study.result, *study.also} <= study.variants.keys()
    for variant in study.variants:
        words = study.line(variant, 0, Path("W")).split()
        assert words[0] in ("embodied", "python")
        given = [word for word in words if not word.startswith("out=")]
        assert words.count(f"out=W/{variant}-0") == 1 and len(given) == len(words) - 1
        of_seed = any(word.endswith("-0") or "/stages-0/" in word for word in given)
        assert "seed=0" in words or (words[1] in ("eval", "improve", "-m") and of_seed)


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_every_line_of_a_study_is_a_command(file: Path) -> None:
    study, work = read_study(file.read_text(), file.stem), Path("W")
    lines = [filled(text, work=work) for text in study.prepare]
    lines += [line for name in study.before for line in study.lines_before(name, 0, work)]
    lines += [line for task in study.tasks(0, work) for line in task.lines.values()]
    lines += [study.line(name, 0, work) for name in study.variants]
    for program, *words in map(shlex.split, lines):
        if program == "embodied":
            cli.parse(words)
        for word in words:
            if word.startswith("experiment="):
                assert Path(f"configs/experiment/{word.partition('=')[2]}.yaml").exists()


SCORE = """import sys, json, pathlib
folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True)
scores = {"eval/x": float(sys.argv[2]), "y": -1}
(folder / "metrics.jsonl").write_text(json.dumps(scores) + chr(10))
"""
TINY = {
    **{"method": "more", "task": "writing numbers", "claim": "two is more than one"},
    **{"metric": "eval/x", "further_metrics": ["y"], "seeds": [0, 1, 2, 3, 4], "tuning_seeds": [9]},
    **{"baseline": "one", "result": "two", "also": {"half": "half as much"}},
}


def test_a_small_study_from_command_to_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variants that write their score; the difference is paired by seed."""
    (tmp_path / "score.py").write_text(SCORE)
    arguments = {"one": "{seed}", "two": "1{seed}", "half": "5"}
    command = f"python {tmp_path}/score.py {{out}} "
    study = TINY | {"variants": {name: command + each for name, each in arguments.items()}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(study))
    tiny: Study = parse(Study, study, "tiny")
    monkeypatch.setattr(evidence, "TABLE", tmp_path / "evidence.md")
    monkeypatch.setattr(evidence, "ARCHIVE", tmp_path / "evidence_withdrawn.md")
    monkeypatch.setattr(evidence, "STUDIES", tmp_path)
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
    for _ in range(2):  # the second time nothing is run again: score.py would fail on its folder
        run(tiny, tmp_path / "work", workers=2)
    assert finished(tiny, tmp_path / "work") == (0, 1, 2, 3, 4)
    evidence.write_down("tiny", tiny, tmp_path / "work")
    facts = json.loads((tmp_path / "results" / "tiny.json").read_text())
    ones = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert facts["scores"] == {"one": ones, "two": [10 + x for x in ones], "half": [5.0] * 5}
    assert facts["further"] == {"y": {name: [-1.0] * 5 for name in arguments}}
    outs = [tmp_path / "work" / f"two-{seed}" for seed in range(5)]
    assert facts["commits"]["two"] == [commit_of(out) for out in outs] and seconds_of(outs[0]) > 0
    evidence.write_table()
    table = (tmp_path / "evidence.md").read_text()
    assert "two: 12 (10, 11, 12, 13, 14) | 10 | 10 [10, 10]; P 100% [100%, 100%] |" in table
    half = "one: 2 (0, 1, 2, 3, 4) | half: 5 (5, 5, 5, 5, 5) | 5 |"
    assert f'| <a id="tiny-half"></a>half as much | writing numbers | 5 | {half}' in table
    assert "| more | the same; y | 5 | one: -1 (-1, -1, -1, -1, -1) |" in table
