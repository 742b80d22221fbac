"""Pushes, sensors that are off, delays: what was asked for happens, and is said."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.viewer import ViewerError
from embodied.viewer.app import Viewer
from embodied.viewer.export.export import replay_of
from embodied.viewer.session.disturbances import Pushes
from embodied.viewer.session.session import Session
from tests import toy_envs
from tests.viewer.sessions import alone

LIFT = {"_target_": "embodied.envs.fr3.env.Fr3", "task": "lift", "num_envs": 1, "threads": 1}


@pytest.fixture(scope="module")
def viewer() -> Iterator[Viewer]:
    with Viewer(alone(build(LIFT, VecEnv)), port=0) as viewer:
        viewer.choose("zero")
        yield viewer


def cube(session: Session) -> np.ndarray:
    names = session.recorder.scene.bodies()
    return session.now.frame.places[next(i for i, n in enumerate(names) if n.endswith("cube"))]


def test_a_push_moves_the_cube_along_the_table(viewer: Viewer) -> None:
    viewer.reset(3)
    viewer.step(2)
    before = cube(viewer.session)
    viewer.push("cube", 1.0)
    viewer.step(3)
    moved = cube(viewer.session) - before
    assert np.hypot(*moved[:2]) > 0.02 and abs(moved[2]) < 0.02
    viewer.refresh()
    assert "Disturbances: cube pushed at step 2" in viewer.page.status.content
    assert replay_of(viewer.session).facts == "seed 3 · cube pushed at step 2"
    # The same again from the moment of the push, which is kept with it.
    viewer.scrub(2)
    viewer.branch()
    viewer.step(3)
    np.testing.assert_allclose(cube(viewer.session) - before, moved, atol=1e-9)
    viewer.reset(3)
    assert viewer.session.trial == ""


def test_the_arm_is_pushed_by_its_joints(viewer: Viewer) -> None:
    viewer.reset(3)
    assert viewer.session.pushes.names == ["cube", "robot"]
    speed = viewer.session.env.batch.qvel[0].copy()
    viewer.push("robot", 2.0)
    change = viewer.session.env.batch.qvel[0] - speed
    # Seven joints and two fingers, none of the cube.
    assert np.linalg.norm(change[:9]) == pytest.approx(2.0) and not change[9:].any()
    with pytest.raises(ViewerError, match=r"table cannot be pushed here \(can: cube, robot\)"):
        viewer.push("table")


def test_gymnasiums_worlds_can_be_pushed_others_not() -> None:
    hopper = build({"_target_": "embodied.envs.gym.Gym", "id": "Hopper-v5", "num_envs": 1}, VecEnv)
    hopper.reset(0)
    pushes = Pushes(hopper)
    assert pushes.names == ["robot"]
    inner = hopper.envs[0].unwrapped.data
    before = inner.qvel.copy()
    pushes.push("robot", 3.0, 1)
    assert np.linalg.norm(inner.qvel - before) == pytest.approx(3.0)
    hopper.close()
    assert Pushes(toy_envs.Reach(1)).names == []


class Watched:
    """Notes what it is shown."""

    explore = False

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, obs, first):
        self.seen.append(obs["state"].clone())
        return torch.full((1, 2), 0.5)


def test_delay_and_darkness_reach_who_acts_and_nobody_else() -> None:
    watched = Watched()
    session = Session(toy_envs.Reach(1), {"watched": lambda: watched}, "watched")
    session.reset(1)
    session.disturbance.late = 2
    for _ in range(5):
        session.advance()
    shown = [moment.obs["state"] for moment in session.episode.moments]
    late = [0, 0, 0, 1, 2]
    for seen, at in zip(watched.seen, late, strict=True):
        assert torch.equal(seen, shown[at])
    session.disturbance.late, session.disturbance.off = 0, {"state"}
    session.advance()
    assert not watched.seen[-1].any() and session.now.next_obs["state"].any()
    assert session.trial == "state is off"
    session.close()
