"""The evidence runner: every study is well formed, runs what is missing, and counts right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import evidence, rules
from benchmarks.evidence import commit_of, finished
from embodied.core.build import ConfigError, parse
from embodied.evaluation.statistics import iqm
from embodied.study.study import Study, command, read_study, run, seconds_of

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
    "controls": {
        "filtered_cloning": "best_third",
        "best_sampler": "sampler",
        "without_part": "without",
    },
}


def fair(**changes: object) -> Study:
    return parse(Study, {**FAIR, **changes}, "fair")


def test_a_fair_study_breaks_no_rule() -> None:
    assert rules.problems(fair()) == [] and rules.tuning_problems(fair()) == []
    assert rules.seeds_alone(fair(), fair().seeds) == ""
    steps = {name: rules.env_steps(fair(), name) for name in fair().variants}
    assert steps == {"bc": 0, "best_third": 0, "sampler": 0, "sac": 4000, "without": 4000}


@pytest.mark.parametrize("role", rules.CONTROLS)
def test_a_control_that_is_missing_is_named(role: str) -> None:
    fewer = {key: value for key, value in FAIR["controls"].items() if key != role}
    assert [role in line for line in rules.problems(fair(controls=fewer))] == [True]
    assert rules.problems(fair(controls=fewer, exempt={role: "why"})) == []


def test_unequal_budgets_unknown_variants_and_kinds_are_named() -> None:
    more = {**FAIR["variants"], "sac": "experiment=pendulum_sac steps=5000"}
    assert "sac 5,000, without 4,000" in rules.problems(fair(variants=more))[0]
    assert (
        "nobody" in rules.problems(fair(controls={**FAIR["controls"], "best_sampler": "nobody"}))[0]
    )
    assert "kind" in rules.problems(fair(kind=""))[0]


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


@pytest.mark.parametrize("file", sorted(evidence.STUDIES.glob("*.yaml")), ids=lambda f: f.stem)
def test_a_study_is_fair_or_withdrawn(file: Path) -> None:
    """And one that was mended is withdrawn no longer."""
    study = evidence.study_of(file.stem)
    assert bool(study.withdrawn) == bool(rules.problems(study))


def test_the_page_says_what_the_rules_say() -> None:
    """`python -m benchmarks.evidence --finished` writes it."""
    assert evidence.TABLE.read_text() == evidence.table()
    for file in evidence.RESULTS.glob("*.json"):
        facts = evidence.current(file.stem, json.loads(file.read_text()))
        for line in evidence.rows(facts):
            assert line.startswith("| WITHDRAWN: ") == bool(facts["withdrawn"])
            few = len(facts["seeds"]) < rules.MIN_SEEDS
            assert not few or ("seeds alone" in line and "[" not in line.split(" | ")[6])


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
    without = (evidence.TABLE, evidence.ROOT / "docs" / "lerobot.md")
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


@pytest.mark.parametrize("file", sorted(evidence.STUDIES.glob("*.yaml")), ids=lambda f: f.stem)
def test_studies_are_well_formed(file: Path) -> None:
    study = read_study(file.read_text(), file.stem)
    assert {study.baseline, study.result, *study.also} <= study.variants.keys()
    for variant in study.variants:
        words = study.line(variant, 0, Path("W")).split()
        assert words[0] in ("embodied", "python")
        outs = [word for word in words if word.startswith("out=")]
        assert [out.partition("=")[2] for out in outs] == [f"W/{variant}-0"]
        of_seed = any(word.endswith("-0") for word in words if word not in outs)
        assert "seed=0" in words or (words[1] == "eval" and of_seed)
        for word in words:
            if word.startswith("experiment="):
                assert Path(f"configs/experiment/{word.partition('=')[2]}.yaml").exists()


def test_a_small_study_from_command_to_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variants that write their score; the difference is paired by seed."""
    code = (
        "import sys, json, pathlib; p = pathlib.Path(sys.argv[1]); p.mkdir(parents=True);"
        "scores = {'eval/x': float(sys.argv[2]), 'y': -1};"
        "(p / 'metrics.jsonl').write_text(json.dumps(scores) + chr(10))"
    )
    (tmp_path / "score.py").write_text(code)
    study = {
        "method": "more",
        "task": "writing numbers",
        "claim": "two is more than one",
        "metric": "eval/x",
        "seeds": [0, 1, 2, 3, 4],
        "variants": {
            "one": f"python {tmp_path}/score.py {{out}} {{seed}}",
            "two": f"python {tmp_path}/score.py {{out}} 1{{seed}}",
            "half": f"python {tmp_path}/score.py {{out}} 5",
        },
        "baseline": "one",
        "result": "two",
        "also": {"half": "half as much"},
        "further_metrics": ["y"],
    }
    tiny: Study = parse(Study, {**study, "tuning_seeds": [9]}, "tiny")
    monkeypatch.setattr(evidence, "TABLE", tmp_path / "evidence.md")
    monkeypatch.setattr(evidence, "STUDIES", tmp_path)
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**study, "tuning_seeds": [9]}))
    for _ in range(2):  # the second time nothing is run again: score.py would fail on its folder
        run(tiny, tmp_path / "work", workers=2)
    assert finished(tiny, tmp_path / "work") == (0, 1, 2, 3, 4)
    evidence.write_down("tiny", tiny, tmp_path / "work")
    facts = json.loads((tmp_path / "results" / "tiny.json").read_text())
    ones = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert facts["scores"] == {"one": ones, "two": [10 + x for x in ones], "half": [5.0] * 5}
    assert facts["further"] == {"y": {name: [-1.0] * 5 for name in ("one", "two", "half")}}
    outs = [tmp_path / "work" / f"two-{seed}" for seed in range(5)]
    assert facts["commits"]["two"] == [commit_of(out) for out in outs] and seconds_of(outs[0]) > 0
    evidence.write_table()
    table = (tmp_path / "evidence.md").read_text()
    assert "two: 12 (10, 11, 12, 13, 14) | 10 | 10 [10, 10]; P 100% [100%, 100%] |" in table
    half = "one: 2 (0, 1, 2, 3, 4) | half: 5 (5, 5, 5, 5, 5) | 5 |"
    assert f"| half as much | writing numbers | 5 | {half}" in table
    assert "| more | the same; y | 5 | one: -1 (-1, -1, -1, -1, -1) |" in table


def test_a_failing_command_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"failed with 3; see .*out\.log"):
        command('python -c "raise SystemExit(3)"', tmp_path / "out")
