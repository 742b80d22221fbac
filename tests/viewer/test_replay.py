"""What is exported: the page holds what was seen, the film plays, the rest is refused."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.viewer import ViewerError
from embodied.viewer.export.export import export, replay
from embodied.viewer.launch import open_session
from embodied.viewer.session.overlays import tip_of
from embodied.viewer.session.session import Session
from tests import toy_envs
from tests.builders import run_folder
from tests.viewer.sessions import FLOW, SEVERAL, alone, play


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return run_folder(
        tmp_path_factory.mktemp("clone"), SEVERAL | {"horizon": 12}, FLOW, steps=(10,)
    )


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
    first, second = (each.episode.moments[0] for each in pair.sessions)
    assert np.array_equal(first.frame.places, second.frame.places)
    assert mine.episode.steps == 12 and pair.length == 13
    pair.seek(6)
    assert mine.at == other.at == 6
    assert np.abs(mine.now.frame.places - other.now.frame.places).max() > 0.01
    pair.seek(12)


def test_the_noise_of_one_does_not_change_the_other(pair: Session, run: Path) -> None:
    lonely = play(open_session(run), 5)
    for mine, same in zip(pair.episode.moments, lonely.episode.moments, strict=True):
        assert mine.action == same.action
    lonely.close()


def test_the_page_holds_the_poses_and_needs_nothing_else(pair: Session) -> None:
    page = replay(pair)
    # Nothing is loaded from anywhere.
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:|//)|@import|fetch\(|import\(", page)
    data = data_of(page)
    lane = data["lanes"][0]
    poses = np.frombuffer(base64.b64decode(lane["poses"]), np.float32)
    poses = poses.reshape(lane["frames"], lane["bodies"], 7)
    moments = pair.episode.moments
    np.testing.assert_allclose(poses[7, :, :3], moments[7].frame.places, atol=1e-6)
    np.testing.assert_allclose(poses[7, :, 3:], moments[7].frame.turns, atol=1e-6)
    assert (lane["steps"], lane["stride"], data["dt"]) == (12, 1, 0.05)
    assert len(page) < 3_000_000
    reward = data["charts"][0]["curves"][0]
    assert reward["values"] == [moment.reward for moment in moments[1:]] and reward["steps"][0] == 1


def test_meshes_are_there_once_and_where_they_were(pair: Session) -> None:
    data = data_of(replay(pair))
    mine, other = data["lanes"]
    assert len(data["meshes"]) < len(mine["shapes"]) + len(other["shapes"])
    drawn = {(shape["body"], shape["mesh"]) for shape in mine["shapes"]}
    assert drawn == {(shape["body"], shape["mesh"]) for shape in other["shapes"]}
    cube = next(i for i, name in enumerate(pair.recorder.scene.bodies()) if "cube" in name)
    shape = next(shape for shape in mine["shapes"] if shape["body"] == cube)
    mesh = data["meshes"][shape["mesh"]]
    places = np.frombuffer(base64.b64decode(mesh["places"]), "<u2").reshape(-1, 3) / 65535
    places = places * mesh["size"] + mesh["low"]
    kept = next(each for each in pair.episode.shapes if each.body == cube).mesh()
    np.testing.assert_allclose(places, kept[0], atol=1.1e-5)
    assert max(mesh["size"]) == pytest.approx(2 * kept[0].max(), rel=1e-3)


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
    assert tip_of(toy_envs.Reach(1).spec) is None
    session = alone(toy_envs.Reach(1))
    session.name = "</script><script>alert(1)</script>"
    page = export(session, tmp_path / "page.html").read_text()
    assert page.count("</script>") == 1
    assert data_of(page)["lanes"][0]["name"].startswith("</script>")
    session.close()


def test_a_film_has_every_moment(tmp_path: Path) -> None:
    from embodied.evaluation.video import read_mp4

    session = alone(
        build({"_target_": "embodied.envs.toy.two_gap.TwoGap", "num_envs": 1, "horizon": 6}, VecEnv)
    )
    file = export(session, tmp_path / "film.mp4", seed=3)
    frames = read_mp4(file)
    assert len(frames) >= 7 and frames.shape[2] == 640
    picture = torch.from_numpy(session.episode.moments[2].frame.picture.picture().copy())
    assert (frames[2, :480].float() - picture.float()).abs().mean() < 3
    gif = export(session, tmp_path / "film.gif", seed=3)
    assert gif.read_bytes()[:6] == b"GIF89a"
    session.close()


def test_files_that_cannot_be_are_refused(tmp_path: Path) -> None:
    session = alone(toy_envs.Reach(1))
    with pytest.raises(ViewerError, match=r"must end with one of \.html, \.mp4, \.gif"):
        export(session, tmp_path / "film.avi")
    with pytest.raises(ViewerError, match=r"cannot be recorded .*Reach has no camera"):
        export(session, tmp_path / "film.mp4")
    with pytest.raises(ViewerError, match='unknown policy "nobody"'):
        open_session(None, SEVERAL, "nobody")
    session.close()
