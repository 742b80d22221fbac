"""What the main view shows: between two steps, and of two policies beside each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from viser import ViserServer

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.envs.fr3.env import Config, Fr3
from embodied.viewer.panels.main_view import MainView, poses_at, spacing
from embodied.viewer.scene.detect import detect_scene
from embodied.viewer.scene.types import Viewpoint
from embodied.viewer.scene.viser_scene import ASPECT, BETWEEN, fitted, of_both, tangent
from embodied.viewer.session.episode import EnvSnapshot, Episode, Moment
from tests import toy_envs
from tests.viewer.sessions import alone


def at(step: int, x: float, turn: list[float]) -> Moment:
    sight = EnvSnapshot(np.array([[x, 0.0, 1.0]]), np.array([turn]))
    return Moment(step, sight, {}, {}, action=[0.0])


def test_half_way_is_half_the_place_and_half_the_turn() -> None:
    session, half = alone(toy_envs.Reach(1)), 0.5**0.5
    # A quarter turn about z, given as the other quaternion that means the same.
    moments = [at(0, 0.0, [1.0, 0, 0, 0]), at(1, 2.0, [-half, 0, 0, -half])]
    session.episode, session.at = Episode(0, moments), 1
    places, turns = poses_at(session, 0.5)
    assert places.tolist() == [[1.0, 0.0, 1.0]]
    eighth = [np.cos(np.pi / 8), 0.0, 0.0, np.sin(np.pi / 8)]
    np.testing.assert_allclose(turns[0], eighth, atol=1e-12)
    places, turns = poses_at(session, 1.0)
    assert places[0, 0] == 2.0 and turns is session.now.frame.turns
    # Nothing is between at the start, and after the end, where a rival's episode goes on.
    for step, place in ((0, 0.0), (5, 2.0)):
        session.at = step
        assert poses_at(session, 0.3)[0][0, 0] == place


def projected(eye: Viewpoint, aspect: float, point: NDArray[Any]) -> tuple[float, float]:
    """Where a point is in a window: right and up, from -1 to 1."""
    ahead = (eye.target - eye.place) / np.linalg.norm(eye.target - eye.place)
    right = np.cross(ahead, (0.0, 0.0, 1.0))
    right /= np.linalg.norm(right)
    seen = point - eye.place
    scale = float(seen @ ahead) * tangent(eye.fov)
    return float(seen @ right) / scale / aspect, float(seen @ np.cross(right, ahead)) / scale


def test_two_robots_are_apart_and_between_the_panels() -> None:
    env = build({"_target_": "embodied.envs.fr3.env.Fr3", "task": "reach", "num_envs": 1}, VecEnv)
    model = detect_scene(env)
    assert model is not None
    try:
        eye = model.viewpoint()
        step = spacing(model, eye)
        both = of_both(eye, step)
        bodies = model.poses()[0][1:]
        # To the right of the first robot's rightmost body the second one begins.
        right = step / np.linalg.norm(step)
        assert float(np.ptp(bodies @ right)) < float(np.linalg.norm(step))
        for window, widest, lowest in ((ASPECT, BETWEEN, -1.0), (375 / 800, 1.0, 0.15)):
            seen = fitted(both, window)
            for centre in (eye.target, eye.target + step):
                x, y = projected(seen, window, centre)
                assert abs(x) < widest and lowest < y < 1.0
    finally:
        env.close()


def test_each_of_two_policies_has_its_name_in_the_scene(
    monkeypatch: pytest.MonkeyPatch, server: ViserServer
) -> None:
    first, second = alone(Fr3(Config(num_envs=1))), alone(Fr3(Config(num_envs=1)))
    first.name, second.name = "steered", "base"
    first.other = second
    first.reset(0)
    labels = dict[str, tuple[float, ...]]()
    real = server.scene.add_label

    def add(name: str, text: str, **settings: Any) -> Any:
        labels[text] = tuple(settings["position"])
        return real(name, text, **settings)

    monkeypatch.setattr(server.scene, "add_label", add)
    view = MainView(server, first)
    assert list(labels) == ["steered", "base"]
    bodies = view.scenes[0].model.poses()[0][1:]
    step = np.subtract(labels["base"], labels["steered"])
    assert np.linalg.norm(step) > 0.6, "as far apart as the scenes"
    assert min(place[2] for place in labels.values()) > bodies[:, 2].max()
    first.close()
