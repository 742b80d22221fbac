"""The GPU bench: without a GPU one line; its code on the pretended device; failures are rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.on_gpu.rows import TINY, Row, Scale
from embodied.core.device import accelerator
from tests.pretend_device.process import Call, on_device
from tests.tiers import only_all, usually

__all__ = ["on_device"]
SLOW = ("checks", "demo")  # runs, which tests/contract/test_device.py has
MEASURED = [name for name in gpu.PARTS if name not in SLOW]
NOT_THERE = ("warp", "maniskill")  # their simulators know CUDA alone


def test_without_a_gpu_it_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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


def test_a_second_run_measures_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(gpu, "separately", lambda name, *rest: asked.append(name))
    gpu.save(tmp_path / "gpu", "sac", [Row("sac, eager", 1.0)], None)
    gpu.save(tmp_path / "gpu", "ppo", [], "not done within 5 s")
    gpu.run(tmp_path, torch.device("cpu"))
    assert asked == [name for name in gpu.PARTS if name != "sac"]


@only_all
def test_what_is_left_when_the_time_is_up_is_said(tmp_path: Path) -> None:
    gpu.separately("sac", tmp_path, torch.device("cpu"), 3.0)
    (row,) = gpu.loaded(tmp_path / "sac.json")
    assert row.error == "the 25 minutes are over: run it again to go on"
    assert sum(seconds for _, seconds in gpu.PARTS.values()) / 60 < 1.4 * gpu.MINUTES
