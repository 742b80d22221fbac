"""The finetune bench: its variants compose; curves over seeds become a table and a plot."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from benchmarks import finetune
from embodied.compose import PACKAGED
from embodied.core.build import ConfigError, parse
from embodied.study.study import Study

SETTINGS = yaml.safe_load(Path(finetune.__file__).with_suffix(".yaml").read_text())


def write_run(work: Path, name: str, scores: list[float]) -> None:
    folder = work / name
    folder.mkdir(parents=True)
    rows = [
        {"step": 100 * (i + 1), "seconds": 60.0 * (i + 1), "eval/success": score}
        for i, score in enumerate(scores)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(f"{folder}.done").write_text("1.0\n")


def study(**variants: str) -> Study:
    return parse(Study, {**SETTINGS, "seeds": [0, 1], "variants": variants}, "finetune")


def test_variants_name_experiments_and_share_the_bc_policy() -> None:
    own: Study = parse(Study, SETTINGS, "finetune")
    for line in own.variants.values():
        words = shlex.split(line.format(work="W", out="O", seed=0))
        (experiment,) = (w.partition("=")[2] for w in words if w.startswith("experiment="))
        assert (PACKAGED / "experiment" / f"{experiment}.yaml").exists()
        assert all(w == "init=W/bc-0" for w in words if w.startswith("init="))


def test_report_of_two_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work, own = tmp_path / "work", study(bc="x", residual="embodied train init=y", unfinished="x")
    for seed, score in enumerate((0.4, 0.6)):
        write_run(work, f"bc-{seed}", [score])
        write_run(work, f"residual-{seed}", [0.8 + score / 5, 0.94 + score / 10])
    write_run(work, "unfinished-0", [0.5])
    finetune.report(own, work, tmp_path)
    facts = json.loads((tmp_path / "finetune.json").read_text())
    assert list(facts["variants"]) == ["residual"] and facts["bc"] == [0.4, 0.6]
    assert facts["variants"]["residual"]["seconds"] == [60.0, 120.0]
    printed = " ".join(capsys.readouterr().out.split())
    assert "100" in printed and "1.0" in printed  # (0.88 + 0.92) / 2 reaches 90% after 100 steps
    assert (tmp_path / "finetune.png").stat().st_size > 10_000


def test_a_bench_without_a_bc_policy_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no seed of the bc"):
        finetune.report(study(bc="x", residual="x"), tmp_path, tmp_path)
