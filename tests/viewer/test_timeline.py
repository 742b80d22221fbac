"""Every step is kept: looked at again, gone on from, and what ended stays to be seen."""

from __future__ import annotations

from collections.abc import Iterator

import mujoco
import numpy as np
import pytest
import torch
from trimesh import creation

from embodied.core.build import build
from embodied.core.env import NotSavable, VecEnv
from embodied.viewer import ViewerError
from embodied.viewer.panels.page import Viewer
from embodied.viewer.scene.types import lighter
from embodied.viewer.session import episode as kept
from embodied.viewer.session.episode import EnvSnapshot, Episode, Moment
from embodied.viewer.session.session import Session
from tests import toy_envs
from tests.viewer.sessions import LIFT, alone


@pytest.fixture(scope="module")
def opened() -> Iterator[Session]:
    session = alone(build(LIFT, VecEnv))
    yield session
    session.close()


@pytest.fixture
def session(opened: Session) -> Session:
    opened.choose("demonstrator")
    opened.reset(3)
    return opened


def poses_of_state(session: Session, moment: Moment) -> np.ndarray:
    """Body places from the kept state alone."""
    model = session.env.model
    data = mujoco.MjData(model)
    state = moment.state["physics"][0].numpy()
    mujoco.mj_setState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION.value)
    mujoco.mj_forward(model, data)
    return data.xpos


def test_every_moment_is_kept_as_it_was(session: Session) -> None:
    places = []
    for _ in range(8):
        places.append(session.recorder.scene.poses()[0])
        session.advance()
    moments = session.episode.moments
    assert [moment.step for moment in moments] == list(range(9))
    for moment, place in zip(moments, places, strict=False):
        np.testing.assert_allclose(moment.frame.places, place, atol=1e-12)
        np.testing.assert_allclose(
            poses_of_state(session, moment)[1:], moment.frame.places[1:], atol=2e-6
        )
    session.seek(2)
    assert session.now is moments[2] and not session.live
    for _ in range(6):
        session.advance()
    # What was kept is walked through again; nothing new has happened.
    assert session.live and session.episode.moments == moments
    session.seek(-4)
    assert session.at == 0


def test_going_on_from_an_earlier_moment_forgets_what_came_later(session: Session) -> None:
    for _ in range(12):
        session.advance()
    before = session.episode.moments[:]
    session.seek(6)
    session.branch()
    assert session.live and session.episode.steps == 6
    # The same policy does the same again.
    for _ in range(6):
        session.advance()
    again = session.episode.moments
    np.testing.assert_array_equal(again[-1].frame.places, before[-1].frame.places)
    assert torch.equal(again[-1].state["physics"], before[-1].state["physics"])
    session.seek(6)
    session.choose("zero")
    session.branch()
    for _ in range(6):
        session.advance()
    assert np.abs(session.now.frame.places - before[12].frame.places).max() > 0.01


def test_the_last_moment_is_the_one_that_ended_it(session: Session) -> None:
    while not session.episode.end:
        session.advance()
    last, before = session.episode.moments[-1], session.episode.moments[-2]
    assert session.episode.success and session.episode.success_steps == [last.step]
    assert last.state is None and before.state is not None
    cube = next(i for i, name in enumerate(session.recorder.scene.bodies()) if "cube" in name)
    rise = last.frame.places[cube, 2] - before.frame.places[cube, 2]
    # Lifted further, not back on the table, where the next episode has it.
    assert 0 < rise < 0.05 and last.frame.places[cube, 2] > 0.1
    assert "z 1" in last.frame.words.partition("cube")[2]
    # The world is at its next start: an earlier moment can still be gone on from.
    session.seek(len(session.episode.moments) - 4)
    session.branch()
    while not session.episode.end:
        session.advance()
    assert session.episode.steps == last.step


def test_a_world_that_cannot_be_saved_says_so() -> None:
    env = toy_envs.Reach(1)
    env.get_state = lambda: (_ for _ in ()).throw(NotSavable("no"))
    session = alone(env)
    session.reset(0)
    session.advance()
    session.advance()
    session.seek(1)
    with pytest.raises(ViewerError, match="cannot continue from an earlier step"):
        session.branch()


def test_a_very_long_episode_forgets_its_oldest_tenth(monkeypatch) -> None:
    monkeypatch.setattr(kept, "LONGEST", 20)
    episode = Episode(0)
    forgotten = [episode.add(Moment(i, EnvSnapshot(), {}, {}, action=[0.0])) for i in range(30)]
    # The 21st is one too many: 2 go; so it goes on at every second.
    assert forgotten.count(2) == 5 and sum(forgotten) == 10
    assert (episode.moments[0].step, episode.steps, len(episode.moments)) == (10, 29, 20)


def test_successes_count_once_while_they_last() -> None:
    flags = [None, False, True, True, False, True]
    moments = [Moment(i, EnvSnapshot(), {}, {}, success=flag) for i, flag in enumerate(flags)]
    episode = Episode(0, moments)
    assert episode.success_steps == [2, 5] and episode.success
    assert Episode(0, moments[:2]).success is False
    assert Episode(0, moments[:1]).success is None


def test_the_viewer_scrubs_plays_kept_moments_and_goes_on() -> None:
    with Viewer(alone(build(LIFT, VecEnv)), port=0) as viewer:
        viewer.choose("demonstrator")
        viewer.reset(3)
        viewer.step(10)
        session = viewer.session
        end = session.episode.moments[-1]
        viewer.back(3)
        assert session.at == 7
        viewer.refresh()
        slider = viewer.page.timeline.slider
        assert (slider.min, slider.max, slider.value) == (0, 10, 7)
        shown = np.stack([frame.position for frame in viewer.page.scene.frames])
        np.testing.assert_allclose(shown, session.episode.moments[7].frame.places, atol=2e-6)
        assert "Step **7** of 10" in viewer.page.status.content
        assert viewer.page.onward.visible
        viewer.step(3)
        assert session.episode.moments[-1] is end and session.live
        viewer.scrub(4)
        viewer.branch()
        assert session.episode.steps == 4
        viewer.refresh()
        assert slider.max == 4 and not viewer.page.onward.visible


def test_meshes_get_lighter_and_keep_their_form() -> None:
    ball = creation.uv_sphere(0.1, (18, 32))
    vertices, faces = ball.vertices, ball.faces
    assert len(faces) > 600
    light, triangles = lighter((vertices, faces), 20)
    assert 100 < len(triangles) < 0.8 * len(faces)
    assert np.abs(np.linalg.norm(light, axis=1) - 0.1).max() < 0.004
    a, b, c = (light[triangles[:, i]].astype(float) for i in range(3))
    volume = np.einsum("fx,fx->f", a, np.cross(b, c)).sum() / 6
    # 4/3 pi r^3, and a polyhedron inside is a little smaller: faces look outwards.
    assert 0.9 < volume / (4 / 3 * np.pi * 1e-3) < 1.0
    box = creation.box()
    few = (box.vertices, box.faces)
    assert len(lighter(few)[1]) == 12
