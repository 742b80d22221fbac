"""The evidence runner: every study is well formed, runs what is missing, and counts right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from embodied import evidence
from embodied.core.build import ConfigError, parse
from embodied.moved import MovedWarning
from embodied.study.study import Study, command, finished, read_study, run


@pytest.mark.parametrize("file", sorted(evidence.STUDIES.glob("*.yaml")), ids=lambda f: f.stem)
def test_studies_are_well_formed(file: Path) -> None:
    study = read_study(file.read_text(), file.stem)
    assert {study.baseline, study.result, *study.also} <= study.variants.keys()
    for variant, line in study.variants.items():
        words = line.format(work="W", out=f"W/{variant}-0", seed=0).split()
        assert words[0] in ("embodied", "python")
        assert f"output=W/{variant}-0" in words
        of_seed = any(word.endswith("-0") for word in words if not word.startswith("output="))
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
        "seeds": [0, 1],
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
    tiny: Study = parse(Study, study, "tiny")
    monkeypatch.setattr(evidence, "TABLE", tmp_path / "evidence.md")
    for _ in range(2):  # the second time nothing is run again: score.py would fail on its folder
        run(tiny, tmp_path / "work", workers=2)
    assert finished(tiny, tmp_path / "work") == (0, 1)
    evidence.write_down("tiny", tiny, tmp_path / "work")
    facts = json.loads((tmp_path / "evidence" / "tiny.json").read_text())
    assert facts["scores"] == {"one": [0.0, 1.0], "two": [10.0, 11.0], "half": [5.0, 5.0]}
    assert facts["further"] == {"y": {name: [-1.0, -1.0] for name in ("one", "two", "half")}}
    evidence.write_table()
    table = (tmp_path / "evidence.md").read_text()
    assert "| 10 [10, 10] |" in table
    assert "one: 0.5 (0, 1)" in table
    assert "| half as much | writing numbers | 2 | one: 0.5 (0, 1) | half: 5 (5, 5) |" in table
    assert "| more | the same; y | 2 | one: -1 (-1, -1) | two: -1 (-1, -1) |" in table


def test_a_failing_command_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"failed with 3; see .*out\.log"):
        command('python -c "raise SystemExit(3)"', tmp_path / "out")


def test_the_former_key_of_variants_is_read_with_a_warning() -> None:
    study = yaml.safe_load(sorted(evidence.STUDIES.glob("*.yaml"))[0].read_text())
    former = {("arms" if key == "variants" else key): value for key, value in study.items()}
    with pytest.warns(MovedWarning, match="variants"):
        assert read_study(yaml.safe_dump(former), "former").variants == study["variants"]
