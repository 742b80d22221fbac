"""`embodied study`: anybody's YAML, in parallel, resumed exactly, with intervals on one page."""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.evaluation.statistics import probability_of_improvement
from embodied.study import study as module
from embodied.study.study import command, read_study, seconds_of
from tests.builders import exit_of
from tests.study.helper import Interrupted

STUDY = """
metric: eval/return
seeds: [0, 1]
base: env=two_gap policy=gaussian learner=sac size=debug
variants:
  wide:
  narrow: policy.hidden=[8]
"""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study of one worker runs `embodied` in this process, which has imported PyTorch."""
    run = subprocess.run

    def run_here(words: list[str], **given: Any) -> Any:
        if "embodied.cli" not in words:
            return run(words, **given)
        with redirect_stdout(given["stdout"]), redirect_stderr(given["stdout"]):
            return SimpleNamespace(returncode=exit_of(*words[4:]))

    monkeypatch.setattr(module.subprocess, "run", run_here)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(STUDY)
    return tmp_path / "mine.yaml"


def test_from_yaml_to_page(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert exit_of("study", file, f"out={out}", "workers=1") == 0
    shown = capsys.readouterr().out
    assert shown.count("embodied train") == 4 and "wide (baseline)" in shown
    found = json.loads((out / "results.json").read_text())
    narrow = found["variants"]["narrow"]
    assert len(narrow["scores"]) == 2 and len(narrow["interval"]) == 2
    assert 0 <= narrow["probability_of_improvement"][0] <= 1
    page = (out / "report.html").read_text()
    assert "P(better than baseline)" in page and page.count("<svg") == 3
    before = (out / "narrow-1" / "run.yaml").stat().st_mtime_ns
    assert exit_of("study", file, f"out={out}") == 0  # nothing is run again
    assert "embodied train" not in capsys.readouterr().out
    assert (out / "narrow-1" / "run.yaml").stat().st_mtime_ns == before


def test_the_end_of_a_run_is_written_whole(tmp_path: Path) -> None:
    """Another thread may write the page as soon as OUT.done exists."""
    outs = [tmp_path / f"run-{number}" for number in range(60)]
    with ThreadPoolExecutor(1) as pool:
        read: list[Future[float]] = []
        for out in outs:
            read.append(pool.submit(_seconds_at_once, out))
            command("true", out)
        assert all(future.result() > 0 for future in read)


def _seconds_at_once(out: Path) -> float:
    end = time.monotonic() + 60
    while not Path(f"{out}.done").exists():
        assert time.monotonic() < end
    return seconds_of(out)


def test_commands_before_a_variant(tmp_path: Path) -> None:
    """A variant is cloned from episodes of another one of its seed."""
    (tmp_path / "own.yaml").write_text("""
metric: eval/success
seeds: [3]
variants:
  first: env=two_gap policy=gaussian learner=sac size=debug
  cloned: env=two_gap policy=flow learner=imitate size=debug demos={work}/own-{seed}
before:
  cloned:
    - >-
      embodied demos collect env=two_gap policy={work}/first-{seed} success_only=false episodes=2
      seed={seed} out={work}/own-{seed}
""")
    out = tmp_path / "out"
    assert exit_of("study", tmp_path / "own.yaml", f"out={out}", "workers=1") == 0
    assert "first-3" in (out / "own-3" / "collect.yaml").read_text()
    assert (out / "cloned-3-before-0.done").exists()
    (line,) = read_study((tmp_path / "own.yaml").read_text(), "own").lines_before("cloned", 4, out)
    assert f"policy={out}/first-4" in line and "seed=4" in line
    (tmp_path / "own.yaml").write_text(STUDY + "before: {missing: [embodied list]}")
    with pytest.raises(ConfigError, match="missing"):
        read_study((tmp_path / "own.yaml").read_text(), "own")


def test_an_interrupted_run_is_resumed_exactly(file: Path, tmp_path: Path) -> None:
    """A run that was stopped in the middle ends with the weights of one that was not."""
    file.write_text(STUDY[: STUDY.index("  narrow")])
    whole, half = tmp_path / "whole", tmp_path / "half"
    words = ["env=two_gap", "policy=gaussian", "learner=sac", "size=debug", "seed=0"]
    assert exit_of("study", file, f"out={whole}", "seeds=[0]", "workers=1") == 0
    assert exit_of("train", *words, f"out={half}/wide-0", "video=false", "steps=120") == 0
    text = (half / "wide-0" / "run.yaml").read_text()
    (half / "wide-0" / "run.yaml").write_text(text.replace("steps: 120", "steps: 240"))
    assert exit_of("study", file, f"out={half}", "seeds=[0]", "workers=1") == 0
    assert "resume=" not in (whole / "wide-0.log").read_text()
    one, other = (
        load_file(checkpoint.find(place / "wide-0") / "policy.safetensors")
        for place in (whole, half)
    )
    assert all(np.array_equal(one[key], other[key]) for key in one)


def test_ctrl_c_and_the_same_command_again(tmp_path: Path) -> None:
    text = STUDY.replace("  wide:", "  wide: steps=3000 save_every=500")
    (tmp_path / "long.yaml").write_text(text.replace("seeds: [0, 1]", "seeds: [0]"))
    study = Interrupted(tmp_path, "out/wide-0", "study", "long.yaml", "out=out", "workers=1")
    assert "embodied: stopped" in study.err
    assert not (tmp_path / "out" / "narrow-0").exists(), "nothing more was started"
    assert "resume=out/wide-0" in study.again()


def test_a_failing_run_does_not_stop_the_others(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = STUDY.replace("  wide:", '  wide: python -c "raise SystemExit(3)"')
    file.write_text(text)
    out = tmp_path / "out"
    assert exit_of("study", file, f"out={out}", "seeds=[0]", "workers=1") == 2
    assert "failed with 3; see" in capsys.readouterr().err
    found = json.loads((out / "results.json").read_text())["variants"]
    assert len(found["narrow"]["scores"]) == 1 and not found["wide"]["scores"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (STUDY.replace("learner=sac", "learner=sax"), 'variant wide: there is no learner "sax"'),
        (STUDY + "baseline: wid\n", 'no variant "wid" (did you mean "wide"?)'),
        (STUDY.replace("metric", "metrik"), 'no setting "metrik" (did you mean "metric"?)'),
        (STUDY.replace("policy.hidden=[8]", "name={x}"), "only {work}, {out} and {seed}"),
        ("3", "should hold metric, seeds and variants"),
        ("seeds: [0,\nmetric: x", "is not YAML, line 2: expected ',' or ']'"),
    ],
)
def test_mistakes_cost_nothing(
    file: Path, text: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert exit_of("study", file, f"out={file.parent}/out") == 2
    assert line in capsys.readouterr().err
    assert not (file.parent / "out").exists()


def test_studies_of_this_project_are_read_as_before() -> None:
    study = read_study(Path("benchmarks/studies/dppo_gap.yaml").read_text(), "dppo_gap")
    assert study.in_order
    line = study.line("bc", 3, Path("w"))
    assert line.startswith("embodied train experiment=two_gap_diffusion")
    assert "demos=w/demos seed=3 out=w/bc-3" in line
    with pytest.raises(ConfigError):
        read_study("metric: x\nseeds: []\nvariants: {a: b}", "none")


def test_probability_of_improvement_by_hand() -> None:
    better, low, high = probability_of_improvement([1.0, 2.0], [0.0, 1.0])
    assert better == (1 + 0.5 + 1 + 1) / 4  # one tie
    assert 0 <= low <= better <= high <= 1
    assert probability_of_improvement([3.0, 4.0], [1.0, 2.0]) == (1.0, 1.0, 1.0)


def test_the_interval_of_an_improvement_is_scipys() -> None:
    """Percentile bootstrap with resampled runs; a difference of a few percent is its chance."""
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(0)
    one, other = random.normal(1.0, 1.0, 8), random.normal(0.5, 1.0, 8)

    def better(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        return (a[..., :, None] > b[..., None, :]).mean((-1, -2))

    options = {"method": "percentile", "n_resamples": 5_000, "rng": np.random.default_rng(1)}
    found = stats.bootstrap((one, other), better, **options).confidence_interval
    mine = probability_of_improvement(one, other, samples=20_000)
    assert mine[1:] == pytest.approx(tuple(found), abs=0.03)
