"""The metrics file through cuts, resumes and processes; progress without a terminal."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch

from embodied.training import logger as module
from embodied.training.logger import Log, newest, read_metrics


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder)]


def test_one_object_a_line(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(10, {"train/critic_loss": torch.tensor(0.5), "train/return": 2})
    log.write(20, {"eval/success": 0.25})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert first["step"] == 10 and first["train/critic_loss"] == 0.5 and first["seconds"] >= 0
    assert second == {"step": 20, "seconds": second["seconds"], "eval/success": 0.25}
    assert log.last == {"train/critic_loss": 0.5, "train/return": 2.0, "eval/success": 0.25}


def logged(folder: Path, *at: int) -> Log:
    log = Log(folder)
    for step in at:
        log.write(step, {"train/loss": step, "train/extra": step})
    return log


@pytest.mark.parametrize("cut", [b'{"step": 40, "tra', b"\0\0\0\0\n", b""])
def test_a_resume_drops_a_cut_line_and_steps_after_the_checkpoint(
    tmp_path: Path, cut: bytes
) -> None:
    logged(tmp_path, 10, 20, 30)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(cut)
    assert steps(tmp_path) == [10, 20, 30]
    again = Log(tmp_path)
    again.begin({}, 100, 20)
    again.write(35, {"train/loss": 7.0})
    assert steps(tmp_path) == [10, 20, 35]
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 3
    assert again.last == {"train/loss": 7.0, "train/extra": 20.0}


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """A limit on the size of files makes the real write fail as a full disk does."""
    log = logged(tmp_path, 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            log.write(20, {"train/loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert steps(tmp_path) == [10]


def test_the_clock_goes_on(tmp_path: Path) -> None:
    row = {"step": 10, "seconds": 1000.0, "train/loss": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    log = Log(tmp_path)
    log.begin({}, 100, 10)
    log.write(20, {"train/loss": 1.0})
    assert read_metrics(tmp_path)[-1]["seconds"] >= 1000.0


def test_a_new_run_starts_anew(tmp_path: Path) -> None:
    logged(tmp_path, 10)
    log = Log(tmp_path)
    log.begin({}, 100, 0)
    log.write(5, {"train/loss": 1.0})
    log.write(6, {})  # nothing to say
    assert steps(tmp_path) == [5]


def test_lines_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PLAIN", -1.0)
    with Log(tmp_path) as log:
        log.begin({"env": "Fr3 [odd]", "folder": "here"}, 200, 0)
        log.write(50, {"eval/success": 0.5})
        log.advance(50)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["env", "Fr3", "[odd]"]
    assert lines[-1].startswith("50/200") and lines[-1].endswith("eval success 50%")


def test_a_bar_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    with Log(tmp_path) as log:
        log.begin({"env": "world"}, 200, 0)
        log.write(50, {"train/success": 0.25})
        log.advance(200)
    shown = capsys.readouterr().out
    assert "200/200" in shown and "train success 25%" in shown


def test_what_people_wait_for_comes_first() -> None:
    less = {"train/loss": 0.1, "train/return": 5.0, "eval/return": 7.0}
    assert newest({**less, "eval/success": 1.0}) == "eval success 100%"
    assert newest(less) == "eval return 7.0" and newest({"train/loss": 0.1}) == "loss 0.1"


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a login nothing leaves the machine; what is logged is in the run folder."""
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Log(tmp_path / "run", "wandb") as log:
        log.begin({}, 20, 0, {"seed": 0})
        log.write(10, {"train/loss": 1.0})
    written = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(written) == 1 and written[0].stat().st_size > 0
