"""Stages of a study: commands that feed each other, choices by a result, loops, and a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from embodied.core.build import ConfigError
from embodied.study.study import Place, Study, choose, filled, plan, read_study
from tests.builders import exit_of, wait_until

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

STUDY = """
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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "add.py").write_text(ADD)
    (tmp_path / "study.yaml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(work: Path) -> list[str]:
    return (work / "log").read_text().split()


def test_stages_feed_each_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of("study", "study.yaml", "out=out", "workers=2") == 0
    found = json.loads((folder / "out" / "results.json").read_text())["variants"]
    # seed + the better choice + three rounds + the last round's number in tenths
    assert found["last"]["scores"] == pytest.approx([1 + 20 + 300 + 0.2 + 1000, 1322.2])
    assert found["data"]["scores"] == [1001.0, 1002.0]
    assert len(ran(folder / "out")) == 2 * (1 + 2 + 6 + 2)
    shown = capsys.readouterr().out
    assert "stage model, seed 1: model.high is the best" in shown
    page = (folder / "out" / "report.html").read_text()
    assert "Choices" in page and "model.low 11, model.high 21" in page
    assert "stages-1/policy-2" in page and "stages-1/model.low" in page
    assert exit_of("study", "study.yaml", "out=out") == 0, "nothing is run again"
    assert len(ran(folder / "out")) == 22


def test_minimize(folder: Path) -> None:
    text = STUDY.replace("best: score", "best: score\n    direction: minimize")
    (folder / "study.yaml").write_text(text)
    assert exit_of("study", "study.yaml", "out=out", "seeds=[1]") == 0
    assert (folder / "out" / "stages-1" / "model").readlink() == Path("model.low")
    found = json.loads((folder / "out" / "results.json").read_text())["variants"]
    assert found["last"]["scores"] == pytest.approx([1 + 10 + 300 + 0.2 + 1000])


def test_a_killed_study_goes_on(folder: Path) -> None:
    """What had finished is not run again; what was running begins anew."""
    out = folder / "out"
    out.mkdir()
    (out / "hang").write_text("policy-1")
    words = [sys.executable, "-m", "embodied.cli", "study", "study.yaml", "out=out", "seeds=[1]"]
    here = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": here}
    with (folder / "shown").open("w") as shown:
        process = subprocess.Popen(
            words, env=environment, start_new_session=True, stdout=shown, stderr=shown
        )
    log = out / "log"
    wait_until(lambda: log.exists() and "policy-1" in ran(out), "policy-1", tick=0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    before = ["data", "model.low", "model.high", "model-0", "policy-0", "model-1", "policy-1"]
    assert ran(out) == before, (folder / "shown").read_text()
    (out / "hang").unlink()
    assert exit_of("study", "study.yaml", "out=out", "seeds=[1]", "workers=1") == 0
    assert ran(out) == [*before, "policy-1", "model-2", "policy-2", "last-1", "data-1"]
    found = json.loads((out / "results.json").read_text())["variants"]
    assert found["last"]["scores"] == pytest.approx([1321.2])


def test_a_seed_whose_stage_fails_has_no_variants(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = STUDY.replace("{out} none {seed}", "{out} none{seed} 7")
    (folder / "study.yaml").write_text(text)
    (folder / "none2").mkdir()
    (folder / "none2" / "value").write_text("0")
    assert exit_of("study", "study.yaml", "out=out") == 2
    assert "stages-1/data" in capsys.readouterr().err
    found = json.loads((folder / "out" / "results.json").read_text())["variants"]
    assert found["last"]["seeds"] == [2] and not (folder / "out" / "last-1.done").exists()


def test_a_choice_that_later_stages_used_is_not_changed(folder: Path) -> None:
    study = read_study(STUDY, "study")
    task = next(task for task in study.tasks(1, folder) if task.best)
    task.out.parent.mkdir()
    low, high = task.lines
    assert choose(task, {low: 1.0, high: float("nan")}) == low
    assert choose(task, {low: 1.0, high: 0.0}) == low and task.out.readlink() == Path(low.name)
    with pytest.raises(ConfigError, match=r"now model.high, and later stages used model.low"):
        choose(task, {low: 1.0, high: 2.0})
    with pytest.raises(ConfigError, match="no choice has a finite score"):
        choose(task, {low: float("nan"), high: float("inf")})


def test_words_of_a_training_and_places() -> None:
    study = read_study(
        "metric: eval/return\nseeds: [0]\nbase: experiment=pendulum_sac\n"
        "stages: [{name: bc, run: steps=10}, {name: tuned, run: 'init={bc.out}', "
        "best: eval/return, choices: {a: learner.tau=0.1, b: }}]\n"
        "variants: {x: 'init={tuned.out}'}",
        "s",
    )
    bc, tuned = study.tasks(0, Path("W"))
    assert [*bc.lines.values()] == [
        "embodied train experiment=pendulum_sac steps=10 seed=0 out=W/stages-0/bc video=false"
    ]
    assert [str(out) for out in tuned.lines] == ["W/stages-0/tuned.a", "W/stages-0/tuned.b"]
    assert "init=W/stages-0/bc learner.tau=0.1 seed=0" in tuned.lines[Path("W/stages-0/tuned.a")]
    assert "init=W/stages-0/tuned seed=0" in study.line("x", 0, Path("W"))


def test_the_settings_of_trainings_are_checked_first(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = STUDY.replace("python add.py {work} {out} none {seed}", "env=two_gap learner=sax")
    (folder / "study.yaml").write_text(text)
    assert exit_of("study", "study.yaml", "out=out") == 2
    assert 'stage data: there is no learner "sax"' in capsys.readouterr().err
    assert not (folder / "out" / "log").exists()


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
    assert changed[0] in STUDY
    with pytest.raises(ConfigError) as wrong:
        read_study(STUDY.replace(*changed), "study")
    assert line in str(wrong.value)


def test_fields_by_hand() -> None:
    assert filled("{a.out}/x {{y}}", a=Place(Path("A"))) == "A/x {y}"
    assert plan((), Path("W"), 0) == []
    assert Study("m", (0,), {"v": "python x"}).tasks(0, Path("W")) == []
