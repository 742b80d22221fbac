"""Measurements side by side, of the loop and on a GPU: by hand and in small."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

from benchmarks import gpu, loop, teachers
from benchmarks.command import ROOT, put_root_on_path, settings
from benchmarks.loop import EVERY, Deadlines, Sleeps, histogram, summary
from benchmarks.measure import Comparison, alone, compare, table, write_json
from benchmarks.on_gpu.rows import TINY, Row, Scale
from embodied.checks.teacher import ready
from embodied.core.build import ConfigError
from embodied.core.device import accelerator
from embodied.teachers.students.meta_acl import records
from tests.builders import Capture, Patch, python
from tests.pretend_device.process import Call, on_device
from tests.teachers import place
from tests.tiers import usually


def test_ratio_is_the_median_over_pairs() -> None:
    rows = Comparison((10.0, 30.0, 40.0), (10.0, 10.0, 20.0))
    assert rows.ratios == (1.0, 3.0, 2.0)
    assert (rows.ratio_median, rows.ratio_iqr) == (2.0, (1.5, 2.5))
    assert (rows.ours_rate, rows.theirs_rate) == (30.0, 10.0)


def test_blocks_take_turns_and_the_order_inside_a_pair_alternates() -> None:
    calls: list[str] = []
    blocks = [lambda: calls.append("a") or 1, lambda: calls.append("b") or 1]
    assert len(compare(*blocks, repeats=3).ratios) == 3
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"


def test_what_is_written_can_be_read_and_printed(tmp_path: Path) -> None:
    rows = [
        Comparison((2.0,), (1.0,), name="pair", target=1.5),
        alone(lambda: 5, repeats=2, name="lonely", unit="items"),
    ]
    assert math.isnan(rows[1].ratio_median)
    path = write_json(tmp_path / "new", "envs", rows)
    content = json.loads(path.read_text())
    assert path.name == "envs.json" and content["machine"]["versions"]["torch"]
    assert [row["ratio_median"] for row in content["rows"]] == [2.0, None]
    console = Console(record=True, width=120)
    table(rows, console=console)
    shown = console.export_text()
    assert "pair (steps)" in shown and "2.00" in shown and "lonely (items)" in shown
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path, "bad", [Comparison((math.nan,), (1.0,))])


def measure(out: Path) -> None:
    """A measurement on one device."""


def measure_on(out: Path, device: str) -> None:
    """A measurement on any device."""


def test_settings_are_words() -> None:
    assert settings(measure, []) == {"out": Path("outputs/bench")}
    assert settings(measure, ["out=here"]) == {"out": Path("here")}
    assert str(settings(measure_on, ["device=cpu"])["device"]) == "cpu"


@pytest.mark.parametrize("word", ["ot=x", "--fast", "out=", "device=cpu"])
def test_other_words_are_refused(word: str) -> None:
    line = "one device only" if word == "device=cpu" else "is not a setting of a benchmark"
    with pytest.raises(ConfigError, match=line):
        settings(measure, [word])


def test_a_child_finds_the_package_from_any_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    put_root_on_path()
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "elsewhere"]
    code = "import benchmarks; print(benchmarks.__file__)"
    done = python("-P", "-c", code, folder=tmp_path, PYTHONPATH=os.environ["PYTHONPATH"])
    assert Path(done.stdout.strip()) == ROOT / "benchmarks" / "__init__.py"


def test_what_is_lost_and_what_of_it_in_a_stall() -> None:
    begin = 10 * EVERY - 0.5
    at = begin + np.array([0.0, 0.1, 0.2, 0.5, 0.6, 1.0, 1.1])  # two lost, then three
    row = summary("it", 10, at, np.array([0.0, 3e-5, 3e-5, 3e-4, 0.0, 0.02, 0.0]))
    assert (row.ticks, row.missed) == (7, 5)
    assert (row.stalls, row.stalled) == (1, 3), "the stall begins at 0.5 s"
    assert row.rate == pytest.approx(6 / 1.1) and row.error == pytest.approx(100 - 600 / 11)
    assert row.worst == pytest.approx(20.0) and row.p50 == pytest.approx(0.03)
    assert row.counts == (5, 0, 0, 1, 0, 0, 0, 0, 1)
    lines = histogram(row).splitlines()
    assert lines[1].split() == ["0", "to", "0.05", "ms", "5", "#" * 29]
    assert lines[-1].split()[:5] == ["10", "to", "more", "ms", "1"]


def test_relative_sleep_drifts_and_deadlines_do_not(monkeypatch: Patch) -> None:
    now = [50.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds + 0.002  # always wakes so late

    monkeypatch.setattr(loop.time, "sleep", sleep)
    for kind, error in ((Deadlines, 0.0), (Sleeps, 100 * (1 - 10 / 12))):
        rate = kind(100, 0.5)
        rate.clock = lambda: now[0]
        rate.begin()
        for _ in range(40):
            now[0] += 0.001
            rate.wait()
        row = summary(rate.name, 100, rate.at[: rate.ticks], rate.lates[: rate.ticks])
        assert row.error == pytest.approx(error, abs=1e-6) and row.missed == 0
        assert row.p50 == pytest.approx(2.0)


__all__ = ["on_device"]
SLOW = ("checks", "demo")  # runs, which tests/contract/test_device.py has
MEASURED = [name for name in gpu.PARTS if name not in SLOW]
NOT_THERE = ("warp", "maniskill")  # their simulators know CUDA alone


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, capsys: Capture) -> None:
    if accelerator() is not None:
        pytest.skip("there is a GPU here")
    assert gpu.run(tmp_path) == []
    assert capsys.readouterr().out.count("\n") == 1
    assert not list(tmp_path.iterdir())


def measured(name: str, folder: Path) -> None:
    gpu.part(name, folder, torch.device("pretend", 0), TINY)


@pytest.mark.parametrize("name", usually(["sac", "warp"], MEASURED))
def test_a_part_measures_or_says_why_not(name: str, tmp_path: Path, on_device: Call) -> None:
    on_device(measured, name, tmp_path)
    assert gpu.done(tmp_path / f"{name}.json")
    rows = gpu.loaded(tmp_path / f"{name}.json")
    assert rows
    for row in rows:
        assert (row.error is not None) == (name in NOT_THERE), row
        assert row.error is not None or row.value is None or row.value > 0


def two_rows(device: torch.device, scale: Scale) -> Iterator[Row]:
    yield Row("first", 2.0, "steps/s")
    raise RuntimeError("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA")


def test_an_error_is_a_row_and_is_tried_again(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """What ran before stays; a process that dies is a row too; parts that are done are kept."""
    monkeypatch.setattr(gpu, "PARTS", {"broken": (two_rows, 60), "gone": (two_rows, 60)})
    device = torch.device("cpu")
    gpu.part("broken", tmp_path / "gpu", device, TINY)
    gpu.separately("gone", tmp_path / "gpu", device, 60)  # a name that the process does not know
    rows = gpu.written(tmp_path, device)
    assert [row.name for row in rows] == ["first", "broken", "gone"]
    assert rows[1].error == "RuntimeError: CUDA error: an illegal memory access"
    assert rows[2].error == "KeyError: 'gone'"
    assert not gpu.done(tmp_path / "gpu" / "broken.json")
    page = (tmp_path / "gpu.md").read_text()
    assert "failed: RuntimeError: CUDA error: an illegal memory access" in page
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["machine"]["device"] == "cpu" and found["parts"]["broken"][0]["value"] == 2.0
    capsys.readouterr()


def test_a_second_run_measures_what_is_missing(tmp_path: Path, monkeypatch: Patch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(gpu, "separately", lambda name, *rest: asked.append(name))
    gpu.save(tmp_path / "gpu", "sac", [Row("sac, eager", 1.0)], None)
    gpu.save(tmp_path / "gpu", "ppo", [], "not done within 5 s")
    gpu.run(tmp_path, torch.device("cpu"))
    assert asked == [name for name in gpu.PARTS if name != "sac"]


def test_a_block_is_as_many_episodes_as_it_says() -> None:
    teacher = place.made("tasks.uniform.Uniform")
    block = teachers.teaching(teacher, 30)
    assert [block(), block()] == [30, 30]
    assert teacher.issued == teachers.ROWS + 60 and len(teacher.pending) == teachers.ROWS


def test_a_classroom_is_made_where_one_is_read(tmp_path: Path) -> None:
    node = yaml.safe_load(Path("configs/teacher/meta_acl.yaml").read_text())
    room = ready(node, teachers.SPEC, tmp_path)
    assert sorted(records(Path(room["archive"]))) == ["seed-1", "seed-2"]
    assert ready({"_target_": "x"}, teachers.SPEC, tmp_path) == {"_target_": "x"}
