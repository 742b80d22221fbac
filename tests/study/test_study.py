"""`embodied study`: anybody's YAML, in parallel, resumed exactly, with intervals on one page; its
stages, which feed each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.evaluation.statistics import probability_of_improvement
from embodied.study import page
from embodied.study import study as module
from embodied.study.study import Place, choose, command, filled, read_study, seconds_of
from tests.builders import ROOT, Capture, Patch, exit_of, wait_until, write_files
from tests.study.test_sweep import Interrupted

STUDY = """
metric: eval/return
seeds: [0, 1]
base: env=two_gap policy=gaussian learner=sac size=debug
variants:
  wide:
  narrow: policy.hidden=[8]
"""


@pytest.fixture(autouse=True)
def here(monkeypatch: Patch) -> None:
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


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())["variants"]


def test_from_yaml_to_page(file: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    assert exit_of("study", file, f"out={out}", "workers=1") == 0
    shown = capsys.readouterr().out
    assert shown.count("embodied train") == 4 and "wide (baseline)" in shown
    narrow = results(out)["narrow"]
    assert len(narrow["scores"]) == 2 and len(narrow["interval"]) == 2
    assert 0 <= narrow["probability_of_improvement"][0] <= 1
    report = (out / "report.html").read_text()
    assert "P(better than baseline)" in report and report.count("<svg") == 3
    before = (out / "narrow-1" / "run.yaml").stat().st_mtime_ns
    assert exit_of("study", file, f"out={out}") == 0  # nothing is run again
    assert "embodied train" not in capsys.readouterr().out
    assert (out / "narrow-1" / "run.yaml").stat().st_mtime_ns == before


def test_the_end_of_a_run_is_written_whole(tmp_path: Path) -> None:
    """Another thread may write the page as soon as OUT.done exists."""

    def seconds_at_once(out: Path) -> float:
        wait_until(Path(f"{out}.done").exists, tick=0)
        return seconds_of(out)

    with ThreadPoolExecutor(1) as pool:
        for out in (tmp_path / f"run-{number}" for number in range(60)):
            read = pool.submit(seconds_at_once, out)
            command("true", out, "true")
            assert read.result() > 0


OWN = """
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
"""


def test_commands_before_a_variant(file: Path, tmp_path: Path) -> None:
    """A variant is cloned from episodes of another one of its seed."""
    file.write_text(OWN)
    out = tmp_path / "out"
    assert exit_of("study", file, f"out={out}", "workers=1") == 0
    assert "first-3" in (out / "own-3" / "collect.yaml").read_text()
    assert (out / "cloned-3-before-0.done").exists()
    (line,) = read_study(OWN, "own").lines_before("cloned", 4, out)
    assert f"policy={out}/first-4" in line and "seed=4" in line
    with pytest.raises(ConfigError, match="missing"):
        read_study(STUDY + "before: {missing: [embodied list]}", "own")


def test_an_interrupted_run_is_resumed_exactly(file: Path, tmp_path: Path) -> None:
    """A run that was stopped in the middle ends with the weights of one that was not."""
    file.write_text(STUDY[: STUDY.index("  narrow")])
    whole, half = tmp_path / "whole", tmp_path / "half"
    words = ["env=two_gap", "policy=gaussian", "learner=sac", "size=debug", "seed=0"]
    assert exit_of("train", *words, f"out={half}/wide-0", "video=false", "steps=120") == 0
    settings = half / "wide-0" / "run.yaml"
    settings.write_text(settings.read_text().replace("steps: 120", "steps: 240"))
    for out in (whole, half):
        assert exit_of("study", file, f"out={out}", "seeds=[0]", "workers=1") == 0
    assert "resume=" not in (whole / "wide-0.log").read_text()
    one, other = (
        load_file(checkpoint.find(out / "wide-0") / "policy.safetensors") for out in (whole, half)
    )
    assert all(np.array_equal(one[key], other[key]) for key in one)


def test_the_seconds_of_a_resumed_run_are_those_of_all_its_parts(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    out = tmp_path / "wide-0"
    (out / "checkpoints" / "10").mkdir(parents=True)
    (out / "checkpoints" / "10" / "loop.pt").touch()
    (out / "metrics.jsonl").write_text('{"step": 10, "seconds": 500.0}\n')
    ended = SimpleNamespace(returncode=0, stdout="")
    monkeypatch.setattr(subprocess, "run", lambda *words, **settings: ended)
    command("embodied train env=two_gap", out, "")
    assert 500 <= seconds_of(out) < 600


def test_ctrl_c_and_the_same_command_again(tmp_path: Path) -> None:
    text = STUDY.replace("  wide:", "  wide: steps=3000 save_every=500")
    (tmp_path / "long.yaml").write_text(text.replace("seeds: [0, 1]", "seeds: [0]"))
    study = Interrupted(tmp_path, "out/wide-0", "study", "long.yaml", "out=out", "workers=1")
    assert "embodied: stopped" in study.err
    assert not (tmp_path / "out" / "narrow-0").exists(), "nothing more was started"
    assert "resume=out/wide-0" in study.again()


def test_a_failing_run_does_not_stop_the_others(
    file: Path, tmp_path: Path, capsys: Capture
) -> None:
    file.write_text(STUDY.replace("  wide:", '  wide: python -c "raise SystemExit(3)"'))
    assert exit_of("study", file, f"out={tmp_path}/out", "seeds=[0]", "workers=1") == 2
    assert "failed with 3; see" in capsys.readouterr().err
    found = results(tmp_path / "out")
    assert len(found["narrow"]["scores"]) == 1 and not found["wide"]["scores"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (STUDY.replace("learner=sac", "learner=sax"), 'variant wide: there is no learner "sax"'),
        (STUDY + "baseline: wid\n", 'no variant "wid" (did you mean "wide"?)'),
        (STUDY.replace("metric", "metrik"), 'no setting "metrik" (did you mean "metric"?)'),
        (STUDY.replace("policy.hidden=[8]", "name={x}"), "only {work}, {out} and {seed}"),
        ("3", "should hold metric, seeds and variants"),
        ("metric: x\nseeds: []\nvariants: {a: b}", "seeds"),
        ("seeds: [0,\nmetric: x", "is not YAML, line 2: expected ',' or ']'"),
    ],
)
def test_mistakes_cost_nothing(file: Path, text: str, line: str, capsys: Capture) -> None:
    file.write_text(text)
    assert exit_of("study", file, f"out={file.parent}/out") == 2
    assert line in capsys.readouterr().err
    assert not (file.parent / "out").exists()


def test_a_study_of_this_project_is_read() -> None:
    study = read_study(Path("benchmarks/studies/demo.yaml").read_text(), "demo")
    assert study.in_order
    line = study.line("bc", 3, Path("w"))
    assert line.startswith("embodied train experiment=fr3_detour_flow")
    assert "demos=w/demos seed=3 out=w/bc-3" in line


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


# Each command adds its number to that of the folder it reads, and notes in WORK/log that it ran.
ADD = """
import json, pathlib, sys
work, out, before, more = *map(pathlib.Path, sys.argv[1:4]), float(sys.argv[4])
value = more + (float((before / "value").read_text()) if before.name != "none" else 0.0)
out.mkdir(parents=True)
(out / "value").write_text(str(value))
(out / "metrics.jsonl").write_text(json.dumps({"step": 1, "score": value}) + "\\n")
with (work / "log").open("a") as log:
    log.write(out.name + chr(10))
if (hang := work / "hang").exists() and hang.read_text() == out.name:
    import time
    time.sleep(600)
"""

STAGED = """
metric: score
seeds: [1, 2]
stages:
  - name: data
    run: python add.py {work} {out} none {seed}
  - name: model
    run: python add.py {work} {out} {data.out}
    choices: {low: "10", high: "20"}
    best: score
  - repeat: 3
    stages:
      - name: model
        run: python add.py {work} {out} {model.out} 100
      - name: policy
        run: python add.py {work} {out} {model.out} 0.{round}
variants:
  last: python add.py {work} {out} {policy.out} 1000
  data: python add.py {work} {out} {data.out} 1000
"""


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: Patch) -> Any:
    """`stages(old, new, ...)` runs the study with a change of its text; its exit status."""
    (tmp_path / "add.py").write_text(ADD)
    monkeypatch.chdir(tmp_path)

    def run(old: str = "", new: str = "", *words: str) -> int | str:
        Path("study.yaml").write_text(STAGED.replace(old, new) if old else STAGED)
        return exit_of("study", "study.yaml", "out=out", *words)

    return run


def ran() -> list[str]:
    return Path("out/log").read_text().split()


def last_scores() -> list[float]:
    return results(Path("out"))["last"]["scores"]


def test_stages_feed_each_other(stages: Any, capsys: Capture) -> None:
    assert stages("", "", "workers=2") == 0
    # seed + the better choice + three rounds + the last round's number in tenths
    assert last_scores() == pytest.approx([1 + 20 + 300 + 0.2 + 1000, 1322.2])
    assert results(Path("out"))["data"]["scores"] == [1001.0, 1002.0]
    assert len(ran()) == 2 * (1 + 2 + 6 + 2)
    assert "stage model, seed 1: model.high is the best" in capsys.readouterr().out
    shown = Path("out/report.html").read_text()
    assert "Choices" in shown and "model.low 11, model.high 21" in shown
    assert "stages-1/policy-2" in shown and "stages-1/model.low" in shown
    assert stages() == 0 and len(ran()) == 22, "nothing is run again"
    for old, new, out in (("none {seed}", "none 7", "data"), ("{data.out} 1000", "7", "data-1")):
        assert stages(old, new) == 2, "results of other lines"
        assert f"{out} was made by `python add.py" in capsys.readouterr().err
    stages("", "")
    assert exit_of("study", "study.yaml", f"out={Path('out').absolute()}") == 0


def test_minimize(stages: Any) -> None:
    assert stages("best: score", "best: score\n    direction: minimize", "seeds=[1]") == 0
    assert Path("out/stages-1/model").readlink() == Path("model.low")
    assert last_scores() == pytest.approx([1 + 10 + 300 + 0.2 + 1000])
    study = replace(read_study(STAGED, "s"), baseline="data", direction="minimize")
    last = page.results(study, Path("out"))["variants"]["last"]  # more than that of `data`
    assert last["probability_of_improvement"] == [0.0, 0.0, 0.0]


def test_a_killed_study_goes_on(stages: Any) -> None:
    """What had finished is not run again; what was running begins anew."""
    write_files(Path(), {"study.yaml": STAGED, "out/hang": "policy-1"})
    words = [sys.executable, "-m", "embodied.cli", "study", "study.yaml", "out=out", "seeds=[1]"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, env=environment, start_new_session=True)
    wait_until(lambda: Path("out/log").exists() and "policy-1" in ran(), "policy-1", tick=0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    before = ["data", "model.low", "model.high", "model-0", "policy-0", "model-1", "policy-1"]
    assert ran() == before
    Path("out/hang").unlink()
    assert stages("", "", "seeds=[1]", "workers=1") == 0
    assert ran() == [*before, "policy-1", "model-2", "policy-2", "last-1", "data-1"]
    assert last_scores() == pytest.approx([1321.2])


def test_a_seed_whose_stage_fails_has_no_variants(stages: Any, capsys: Capture) -> None:
    write_files(Path(), {"none2/value": "0"})
    assert stages("{out} none {seed}", "{out} none{seed} 7") == 2
    assert "stages-1/data" in capsys.readouterr().err
    assert results(Path("out"))["last"]["seeds"] == [2]
    assert not Path("out/last-1.done").exists()


def test_a_choice_that_later_stages_used_is_not_changed(tmp_path: Path) -> None:
    study = read_study(STAGED, "study")
    task = next(task for task in study.tasks(1, tmp_path) if task.best)
    task.out.parent.mkdir()
    low, high = task.lines
    assert choose(task, {low: 1.0, high: float("nan")}) == low
    assert choose(task, {low: 1.0, high: 0.0}) == low and task.out.readlink() == Path(low.name)
    with pytest.raises(ConfigError, match=r"now model.high, and later stages used model.low"):
        choose(task, {low: 1.0, high: 2.0})
    with pytest.raises(ConfigError, match="no choice has a finite score"):
        choose(task, {low: float("nan"), high: float("inf")})


TUNED = """
metric: eval/return
seeds: [0]
base: experiment=pendulum_sac
stages:
  - {name: bc, run: steps=10}
  - {name: tuned, run: 'init={bc.out}', best: eval/return, choices: {a: learner.tau=0.1, b: }}
variants: {x: 'init={tuned.out}'}
"""


def test_words_of_a_training_and_places() -> None:
    study = read_study(TUNED, "s")
    bc, tuned = study.tasks(0, Path("W"))
    assert [*bc.lines.values()] == [
        "embodied train experiment=pendulum_sac steps=10 seed=0 out=W/stages-0/bc video=false"
    ]
    assert [str(out) for out in tuned.lines] == ["W/stages-0/tuned.a", "W/stages-0/tuned.b"]
    assert "init=W/stages-0/bc learner.tau=0.1 seed=0" in tuned.lines[Path("W/stages-0/tuned.a")]
    assert "init=W/stages-0/tuned seed=0" in study.line("x", 0, Path("W"))
    assert filled("{a.out}/x {{y}}", a=Place(Path("A"))) == "A/x {y}"


def test_the_settings_of_trainings_are_checked_first(stages: Any, capsys: Capture) -> None:
    assert stages("python add.py {work} {out} none {seed}", "env=two_gap learner=sax") == 2
    assert 'stage data: there is no learner "sax"' in capsys.readouterr().err
    assert not Path("out/log").exists()


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (("{data.out}\n    choices", "{dat.out}\n    choices"), 'no stage "dat" before it'),
        (("{policy.out} 1000", "{polici.out} 1000"), 'no stage "polici" before it (did you mean'),
        (("{policy.out} 1000", "{policy} 1000"), "{NAME.out} of an earlier stage"),
        (("{policy.out} 1000", "{policy.oot} 1000"), "{NAME.out} of an earlier stage"),
        (("name: policy", "name: policy.x"), 'stage "policy.x" needs a name'),
        (("name: policy", "name: model"), 'there are two stages "model"'),
        (("repeat: 3", "repeat: 3\n    best: score"), "is a loop and has only `repeat`"),
        (("    best: score\n", ""), "choices and best: METRIC belong together"),
        (("name: data", "name: data\n    repeat: 2"), "repeat is for a loop"),
        (("name: data", "name: data\n    runs: 2"), 'no setting "runs"'),
    ],
)
def test_mistakes_are_one_line(changed: tuple[str, str], line: str) -> None:
    assert changed[0] in STAGED
    with pytest.raises(ConfigError) as wrong:
        read_study(STAGED.replace(*changed), "study")
    assert line in str(wrong.value)
