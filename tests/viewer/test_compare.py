"""Runs beside each other on one page, and a run's evaluations beside its checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from viser import ViserServer

from embodied.evaluation.video import write_mp4
from embodied.viewer import ViewerError
from embodied.viewer.export.compare_runs import compare
from embodied.viewer.launch import Run
from embodied.viewer.panels.main_view import Checkpoints
from embodied.viewer.session.episode import history_of
from tests.builders import exit_of
from tests.viewer.browser import Browser, program


def make_run(folder: Path, success: list[float], lr: float) -> Path:
    folder.mkdir(parents=True)
    rows = [{"step": 0, "seconds": 0.1, "train/loss": 2.0}]
    for i, share in enumerate(success, 1):
        ends = {"eval/success": share, "eval/return": share, "eval/episodes": 50.0}
        rows.append({"step": 100 * i, "seconds": 60.0 * i, "train/loss": 1 / i, **ends})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    learner = {"_target_": "embodied.learners.swim.Swim", "lr": lr}
    (folder / "run.yaml").write_text(yaml.safe_dump({"learner": learner, "seed": 0}))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    one = make_run(tmp_path / "first", [0.2, 0.5], 1e-3)
    (one / "videos").mkdir()
    write_mp4(one / "videos" / "success.mp4", torch.zeros(4, 16, 16, 3).byte(), 10)
    return [one, make_run(tmp_path / "sec<ond", [0.1, 0.9], 1e-4)]


def test_the_page_has_success_curves_films_and_differences(runs: list[Path]) -> None:
    page = compare(runs, runs[0].parent / "page.html").read_text()
    # 25 of 50: Wilson 36.6% to 63.4%; 45 of 50: 78.6% to 95.7%.
    assert "50% [37%, 63%] of 50" in page and "90% [79%, 96%] of 50" in page
    assert "sec&lt;ond" in page and "sec<ond" not in page
    captions = re.findall(r"<figcaption>(\S+) <small>by environment steps</small>", page)
    assert captions[:3] == ["eval/success", "eval/return", "train/loss"]
    assert page.count("data:video/mp4;base64,") == 1 and "no video of a success" in page
    assert re.search(r"<th>learner\.lr</th><td>0\.001</td><td>0\.0001</td>", page)
    assert "<th>seed</th>" not in page
    assert not re.search(r"(src|href)=\"https?:", page)


@pytest.mark.skipif(program() is None, reason="there is no Chromium (Debian: chromium)")
def test_it_fits_a_narrow_screen(runs: list[Path]) -> None:
    """Both runs' figures and settings are there without scrolling sideways, in a size to read."""
    other = {"learner": {"_target_": "embodied.learners.swim.Swim", "layer_norm": True}}
    (runs[1] / "run.yaml").write_text(yaml.safe_dump(other))
    file = compare(runs, runs[0].parent / "page.html")
    with Browser(file.as_uri(), (375, 760)) as browser:
        browser.resize(375, 760, mobile=True)
        browser.wait("document.querySelectorAll('table').length === 2")
        assert browser.run("document.documentElement.scrollWidth") <= 375
        for table in browser.run(
            "[...document.querySelectorAll('table')].map(t => [t.scrollWidth, t.clientWidth])"
        ):
            assert table[0] <= table[1] + 1
        size = "document.querySelector('svg text.y').getBoundingClientRect().height"
        assert browser.run(size) > 9
        assert "true" in browser.words() and "True" not in browser.words()


def test_a_run_on_a_dataset_is_a_level_beside_runs_in_an_environment(runs: list[Path]) -> None:
    clone = make_run(runs[0].parent / "clone", [0.3], 1e-3)
    (clone / "run.yaml").write_text(yaml.safe_dump({"data": {"regime": "offline"}}))
    page = compare([clone, runs[0]], runs[0].parent / "page.html").read_text()
    figures = {name: rest for name, rest in re.findall(r"<figcaption>(\S+) (.+?)</figure>", page)}
    assert "clone (after 100 updates)" in figures["eval/success"]
    assert "stroke-dasharray" in figures["eval/success"]
    assert "train/loss" not in figures, "its x axis would be two things"
    both = compare([clone, clone], runs[0].parent / "page.html").read_text()
    assert "by gradient updates" in both and both.count("<circle") >= 2, "one point is a dot"


def test_from_the_command_line_and_what_is_wrong(runs: list[Path], tmp_path: Path, capsys) -> None:
    file = tmp_path / "out.html"
    assert exit_of("view", "--compare", *runs, f"out={file}") == 0
    assert file.exists() and str(file) in capsys.readouterr().out
    with pytest.raises(ViewerError, match="two or more"):
        compare(runs[:1], file)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ViewerError, match=r"has no metrics\.jsonl"):
        compare([runs[0], tmp_path / "empty"], file)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    same = [make_run(tmp_path / seed / "run", [0.5], 1e-3) for seed in ("0", "1")]
    page = compare(same, tmp_path / "page.html").read_text()
    assert str(same[0]) in page and str(same[1]) in page


def test_the_history_of_a_run_and_its_checkpoints(runs: list[Path], server: ViserServer) -> None:
    history = history_of(runs[1])
    assert history is not None and history.measure == "eval/success"
    assert (history.steps, history.values) == ([100, 200], [0.1, 0.9])
    assert history.low[0] == pytest.approx(0.0435, abs=1e-3)
    assert history.at(150) == pytest.approx(0.5)
    folders = tuple(runs[1] / "checkpoints" / f"{step:08d}" for step in (100, 150))
    picked: list[str] = []
    run = Run({}, None, folders, folders[0], runs[1])
    shown = Checkpoints(server, run, picked.append)
    shown.show("checkpoint 00000150")
    steps, values, _, _, marks, mine = shown.plot.data
    assert steps.tolist() == [100, 150, 200]
    assert values.tolist() == pytest.approx([0.1, 0.5, 0.9])
    assert mine[1] == pytest.approx(0.5) and mine[[0, 2]].tolist() != mine[[0, 2]].tolist()
    assert marks[:2].tolist() == pytest.approx([0.1, 0.5])
    assert shown.words("checkpoint 00000150") == "eval success at 150: **50%**"
    assert shown.words("random") == ""
    shown.move("checkpoint 00000150", -1)
    shown.move("checkpoint 00000150", 1)
    assert picked == ["checkpoint 00000100", "checkpoint 00000150"]


def test_a_history_of_returns_has_a_range_before_a_checkpoint_is_chosen(
    tmp_path: Path, server: ViserServer
) -> None:
    lines = (f'{{"step": {step}, "eval/return": {step - 400}}}\n' for step in (100, 300))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    shown = Checkpoints(server, Run({}, None, (), tmp_path, tmp_path), lambda _: None)
    assert shown.plot.scales["y"]["range"] == (-310.0, -90.0)
