"""Between two steps the scene is between them; a turn goes the short way."""

from __future__ import annotations

import numpy as np
import pytest

from embodied.viewer.panels.main_view import poses_at
from embodied.viewer.session.episode import Episode, Moment
from embodied.viewer.session.session import Session
from embodied.viewer.session.snapshot import EnvSnapshot
from tests import toy_envs
from tests.viewer.sessions import alone


def at(step: int, x: float, turn: list[float]) -> Moment:
    sight = EnvSnapshot(np.array([[x, 0.0, 1.0]]), np.array([turn]))
    return Moment(step, sight, {}, {}, action=[0.0])


@pytest.fixture
def session() -> Session:
    session = alone(toy_envs.Reach(1))
    half = 0.5**0.5
    # A quarter turn about z, given as the other quaternion that means the same.
    moments = [at(0, 0.0, [1.0, 0, 0, 0]), at(1, 2.0, [-half, 0, 0, -half])]
    session.episode, session.at = Episode(0, moments), 1
    return session


def test_half_way_is_half_the_place_and_half_the_turn(session: Session) -> None:
    places, turns = poses_at(session, 0.5)
    assert places.tolist() == [[1.0, 0.0, 1.0]]
    eighth = [np.cos(np.pi / 8), 0.0, 0.0, np.sin(np.pi / 8)]
    np.testing.assert_allclose(turns[0], eighth, atol=1e-12)
    places, turns = poses_at(session, 1.0)
    assert places[0, 0] == 2.0 and turns is session.now.frame.turns


def test_at_the_start_and_after_the_end_nothing_is_between(session: Session) -> None:
    session.at = 0
    assert poses_at(session, 0.3)[0][0, 0] == 0.0
    # A rival's episode goes on: this one stays where it ended.
    session.at = 5
    assert poses_at(session, 0.3)[0][0, 0] == 2.0
