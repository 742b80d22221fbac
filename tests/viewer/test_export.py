"""What is written to a file: the page holds what was seen, the film plays, runs are compared."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from viser import ViserServer

from embodied.commands import view
from embodied.evaluation.video import read_mp4, write_mp4
from embodied.viewer import ViewerError
from embodied.viewer.export.compare_runs import compare, lines_of, read_runs
from embodied.viewer.export.export import export, replay
from embodied.viewer.launch import Run, open_session
from embodied.viewer.panels.main_view import Checkpoints
from embodied.viewer.session.episode import history_of
from embodied.viewer.session.overlays import tip_of
from embodied.viewer.session.session import Session
from tests import toy_envs
from tests.builders import exit_of, node_of, run_folder
from tests.viewer.browser import Browser, program
from tests.viewer.sessions import FLOW, SEVERAL, alone, body, play


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    return run_folder(folder, SEVERAL | {"horizon": 12}, FLOW, steps=(10,))


@pytest.fixture(scope="module")
def pair(run: Path) -> Iterator[Session]:
    session = play(open_session(run, None, "demonstrator"), 5)
    yield session
    session.close()


def data_of(page: str) -> dict:
    found = re.search(r"^const DATA = (.*);$", page, re.M)
    assert found is not None
    return json.loads(found[1])


def test_both_begin_alike_and_go_on_until_the_last_has_ended(pair: Session) -> None:
    mine, other = pair.sessions
    assert other.name == other.chosen == "demonstrator"
    first, second = (each.episode.moments[0].frame.places for each in pair.sessions)
    assert np.array_equal(first, second)
    assert mine.episode.steps == 12 and pair.length == 13
    pair.seek(6)
    assert mine.at == other.at == 6
    assert np.abs(mine.now.frame.places - other.now.frame.places).max() > 0.01
    pair.seek(12)


def test_the_noise_of_one_does_not_change_the_other(pair: Session, run: Path) -> None:
    lonely = play(open_session(run), 5)
    assert pair.episode.actions == lonely.episode.actions
    lonely.close()


def test_the_page_holds_the_poses_and_needs_nothing_else(pair: Session) -> None:
    page = replay(pair)
    # Nothing is loaded from anywhere.
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:|//)|@import|fetch\(|import\(", page)
    assert len(page) < 3_000_000
    data = data_of(page)
    lane = data["lanes"][0]
    rewards = np.cumsum([moment.reward for moment in pair.episode.moments])
    np.testing.assert_allclose(lane["returns"], rewards, rtol=1e-4)
    poses = np.frombuffer(base64.b64decode(lane["poses"]), np.float32)
    poses = poses.reshape(lane["frames"], lane["bodies"], 7)
    frame = pair.episode.moments[7].frame
    np.testing.assert_allclose(poses[7], np.hstack([frame.places, frame.turns]), atol=1e-6)
    assert (lane["steps"], lane["stride"], data["dt"]) == (12, 1, 0.05)
    reward = data["charts"][0]["curves"][0]
    assert reward["values"] == pair.episode.rewards and reward["steps"][0] == 1


def test_meshes_are_there_once_and_where_they_were(pair: Session) -> None:
    data = data_of(replay(pair))
    mine, other = (lane["shapes"] for lane in data["lanes"])
    assert len(data["meshes"]) < len(mine) + len(other)
    drawn, again = ({(each["body"], each["mesh"]) for each in lane} for lane in (mine, other))
    assert drawn == again
    cube = body(pair, "cube")
    shape = next(shape for shape in mine if shape["body"] == cube)
    mesh = data["meshes"][shape["mesh"]]
    places = np.frombuffer(base64.b64decode(mesh["places"]), "<u2").reshape(-1, 3) / 65535
    places = places * mesh["size"] + mesh["low"]
    kept = next(each for each in pair.episode.shapes if each.body == cube).mesh()
    np.testing.assert_allclose(places, kept[0], atol=1.1e-5)


def test_plans_lead_where_the_world_would_go(pair: Session) -> None:
    name, at = tip_of(pair.spec)
    assert pair.spec.obs[name].names[at : at + 3] == ("tool_x", "tool_y", "tool_z")
    plans = pair.plans()
    # execute=2 of 4: a decision at every second step.
    assert [at for at, _ in plans] == [0, 2, 4, 6, 8, 10]
    at, paths = plans[1]
    assert len(paths) == 8 and all(path.shape == (5, 3) for path in paths)
    trail = pair.trail()
    assert trail.shape == (13, 3)
    # The first steps of the chunk were executed: there the tool really went.
    np.testing.assert_allclose(paths[0][:3], trail[at : at + 3], atol=1e-6)
    # Other draws begin in the same place and go elsewhere.
    np.testing.assert_allclose(paths[3][0], paths[0][0])
    assert np.abs(paths[3][-1] - paths[0][-1]).max() > 1e-4
    pair.seek(3)
    np.testing.assert_array_equal(pair.plan_paths()[0], paths[0])
    pair.seek(12)


def test_what_is_written_cannot_end_the_script(tmp_path: Path) -> None:
    session = alone(toy_envs.Reach(1))
    assert tip_of(session.spec) is None
    session.name = "</script><script>alert(1)</script>"
    page = export(session, tmp_path / "page.html").read_text()
    assert page.count("</script>") == 1
    assert data_of(page)["lanes"][0]["name"].startswith("</script>")


def test_a_film_has_every_moment(tmp_path: Path) -> None:
    session = alone(node_of("envs.toy.two_gap.TwoGap", num_envs=1, horizon=6))
    frames = read_mp4(export(session, tmp_path / "film.mp4", seed=3))
    assert len(frames) >= 7 and frames.shape[2] == 640
    picture = torch.from_numpy(session.episode.moments[2].frame.picture.picture().copy())
    assert (frames[2, :480].float() - picture.float()).abs().mean() < 3
    gif = export(session, tmp_path / "film.gif", seed=3)
    assert gif.read_bytes()[:6] == b"GIF89a"


def test_files_that_cannot_be_are_refused(tmp_path: Path) -> None:
    session = alone(toy_envs.Reach(1))
    with pytest.raises(ViewerError, match=r"must end with one of \.html, \.mp4, \.gif"):
        export(session, tmp_path / "film.avi")
    with pytest.raises(ViewerError, match=r"cannot be recorded .*Reach has no camera"):
        export(session, tmp_path / "film.mp4")
    with pytest.raises(ViewerError, match='unknown policy "nobody"'):
        open_session(None, SEVERAL, "nobody")


def make_run(folder: Path, success: list[float], lr: float) -> Path:
    folder.mkdir(parents=True)
    rows = [{"step": 0, "seconds": 0.1, "train/loss": 2.0}]
    for i, share in enumerate(success, 1):
        ends = {"eval/success": share, "eval/return": share, "eval/episodes": 50.0}
        rows.append({"step": 100 * i, "seconds": 60.0 * i, "train/loss": 1 / i, **ends})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    set_run(folder, {"learner": node_of("learners.swim.Swim", lr=lr), "seed": 0})
    return folder


def set_run(folder: Path, settings: dict[str, object]) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    one = make_run(tmp_path / "first", [0.2, 0.5], 1e-3)
    (one / "videos").mkdir()
    write_mp4(one / "videos" / "success.mp4", torch.zeros(4, 16, 16, 3).byte(), 10)
    return [one, make_run(tmp_path / "sec<ond", [0.1, 0.9], 1e-4)]


def test_the_page_has_success_curves_films_and_differences(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.html"
    assert exit_of("view", "--compare", *runs, f"out={file}") == 0
    assert str(file) in capsys.readouterr().out
    page = file.read_text()
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
def test_it_fits_a_narrow_screen(runs: list[Path], tmp_path: Path) -> None:
    """Both runs' figures and settings are there without scrolling sideways, in a size to read."""
    set_run(runs[1], {"learner": node_of("learners.swim.Swim", layer_norm=True)})
    with Browser(compare(runs, tmp_path / "page.html").as_uri(), (375, 760)) as browser:
        browser.resize(375, 760, mobile=True)
        browser.wait("document.querySelectorAll('table').length === 2")
        assert browser.run("document.documentElement.scrollWidth") <= 375
        tables = "[...document.querySelectorAll('table')]"
        assert browser.run(f"{tables}.every(t => t.scrollWidth <= t.clientWidth + 1)")
        size = "document.querySelector('svg text.y').getBoundingClientRect().height"
        assert browser.run(size) > 9
        assert "true" in browser.words() and "True" not in browser.words()


def test_a_run_on_a_dataset_is_a_level_beside_runs_in_an_environment(
    runs: list[Path], tmp_path: Path
) -> None:
    clone = make_run(tmp_path / "clone", [0.3], 1e-3)
    set_run(clone, {"data": {"regime": "offline"}})
    page = compare([clone, runs[0]], tmp_path / "page.html").read_text()
    figures = dict(re.findall(r"<figcaption>(\S+) (.+?)</figure>", page))
    assert "clone (after 100 updates)" in figures["eval/success"]
    assert "stroke-dasharray" in figures["eval/success"]
    assert "train/loss" not in figures, "its x axis would be two things"
    both = compare([clone, clone], tmp_path / "page.html").read_text()
    assert "by gradient updates" in both and both.count("<circle") >= 2, "one point is a dot"


def test_two_runs_are_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "run.yaml").write_text("env: {}")
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(view, "_export", lambda *given: asked.append(given))
    assert exit_of("view", *folders[:2], "export=film.mp4") == 0
    assert [(run, against) for _, run, _, against, _ in asked] == [(folders[0], str(folders[1]))]
    assert exit_of("view", *folders, "export=film.mp4") != 0 and len(asked) == 1


def test_seeds_of_an_experiment_are_one_curve_with_a_band(tmp_path: Path) -> None:
    for name, seed, gamma, returns in (("a", 0, 0.9, 1), ("b", 1, 0.9, 3), ("c", 0, 0.5, 9)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.yaml").write_text(f"seed: {seed}\nout: {name}\nlearner: {{gamma: {gamma}}}")
        rows = [{"step": step, "eval/return": returns * step} for step in (10, 20)]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    first, other = lines_of(read_runs([tmp_path / name for name in "abc"]))
    assert first.curve("eval/return") == [(10, 20), (20, 40)]
    assert first.band("eval/return") == [(10, 30), (20, 60)]
    assert (first.name, other.name) == ("a and other seeds (2)", "c")
    assert other.curve("eval/return") == [(10, 90), (20, 180)] and other.band("eval/return") == []


def test_what_cannot_be_compared_is_refused_and_equal_names_are_told_apart(tmp_path: Path) -> None:
    same = [make_run(tmp_path / seed / "run", [0.5], 1e-3) for seed in ("0", "1")]
    page = compare(same, tmp_path / "page.html").read_text()
    assert str(same[0]) in page and str(same[1]) in page
    with pytest.raises(ViewerError, match="two or more"):
        compare(same[:1], tmp_path / "page.html")
    with pytest.raises(ViewerError, match=r"has no metrics\.jsonl"):
        compare([same[0], tmp_path], tmp_path / "page.html")


def test_the_history_of_a_run_and_its_checkpoints(runs: list[Path], server: ViserServer) -> None:
    history = history_of(runs[1])
    assert history is not None and history.measure == "eval/success"
    assert (history.steps, history.values) == ([100, 200], [0.1, 0.9])
    assert history.low[0] == pytest.approx(0.0435, abs=1e-3)
    folders = tuple(runs[1] / "checkpoints" / f"{step:08d}" for step in (100, 150))
    picked: list[str] = []
    shown = Checkpoints(server, Run({}, None, folders, folders[0], runs[1]), picked.append)
    shown.show("checkpoint 00000150")
    steps, values, _, _, marks, mine = shown.plot.data
    assert steps.tolist() == [100, 150, 200]
    np.testing.assert_allclose(values, [0.1, 0.5, 0.9])
    np.testing.assert_allclose(marks, [0.1, 0.5, np.nan])
    np.testing.assert_allclose(mine, [np.nan, 0.5, np.nan])
    assert shown.words("checkpoint 00000150") == "eval success at 150: **50%**"
    assert shown.words("checkpoint 00000100") == "eval success at 100: **10%** [4%, 21%]"
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
