"""Worlds that are shown as a picture: what is drawn, when, and what else the page says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.viewer.panels.page import Viewer
from embodied.viewer.scene.types import cloud_of, is_picture, picture_of
from tests import toy_envs
from tests.viewer.sessions import alone


def opened(name: str, **settings: object) -> Viewer:
    node = yaml.safe_load(Path(f"configs/env/{name}.yaml").read_text())
    return Viewer(alone(build(node | {"num_envs": 1} | settings, VecEnv)), port=0, seed=2)


@pytest.mark.parametrize("name", ["two_gap", "minigrid_doorkey"])
def test_the_picture_is_the_worlds_own_and_moves_with_it(name: str) -> None:
    with opened(name) as viewer:
        stage, env = viewer.page.main_view, viewer.session.env
        assert stage.scene is None and stage.screen is not None
        before = stage.screen.picture.image.copy()
        viewer.step(9)
        viewer.refresh()
        assert viewer.session.episode.end == ""
        shown = stage.screen.picture.image
        high, wide = shown.shape[:2]
        assert np.array_equal(shown, env.render(0, wide, high).numpy())
        assert not np.array_equal(shown, before)
        assert viewer.page.observations.text.content.split()[:4] == env.describe(0).split()[:4]
        assert viewer.session.recorder.render_error == ""


def test_the_picture_of_an_end_stays_until_the_next_episode() -> None:
    with opened("two_gap", horizon=5) as viewer:
        viewer.step(4)
        viewer.refresh()
        last = viewer.page.main_view.screen.picture.image.copy()
        viewer.step()
        viewer.refresh()
        assert viewer.session.episode.end == "out of time"
        end = viewer.page.main_view.screen.picture.image
        # What the last action led to: near where it was, and not yet the next start.
        assert 0 < np.mean(end != last) < 0.2
        viewer.step()
        viewer.refresh()
        assert not np.array_equal(viewer.page.main_view.screen.picture.image, last)


def test_the_demonstrator_of_the_configuration_may_act() -> None:
    with opened("two_gap") as viewer:
        viewer.choose("demonstrator")
        viewer.reset(2)
        while not viewer.session.episode.end:
            viewer.step()
        assert viewer.session.episode.success


class Signs(toy_envs.Counter):
    """Discrete actions with names; an image, depth and points to look at, but no camera."""

    def __init__(self) -> None:
        super().__init__(toy_envs.Config(num_envs=1))
        act = Leaf((), "int64", 0, 2, names=("left", "right", "wait"))
        obs = {
            **self.spec.obs,
            "rgb": Leaf((4, 6, 3), "uint8", 0, 255),
            "depth": Leaf((16, 16, 1), unit="m"),
            "points": Leaf((5, 6), unit="m", names=("x", "y", "z", "red", "green", "blue")),
        }
        self.spec = Spec(obs, act, dt=0.5)

    def _obs(self) -> dict[str, Tensor]:
        state = super()._obs()
        image = torch.full((1, 4, 6, 3), int(self.age[0]) + 10, dtype=torch.uint8)
        points = torch.full((1, 5, 6), 0.25) + self.age[0]
        return state | {"rgb": image, "depth": torch.ones(1, 16, 16, 1), "points": points}


def test_images_points_and_names_of_actions_are_shown() -> None:
    with Viewer(alone(Signs()), port=0) as viewer:
        page = viewer.page
        viewer.step(2)
        viewer.refresh()
        # Without a camera the largest image among the observations is large in the page.
        assert page.main_view.screen.picture.image.shape == (160, 240, 3)
        assert set(page.main_view.screen.picture.image.ravel()) == {12}
        assert set(page.observations.images) == {"rgb", "depth"}
        assert set(page.observations.images["rgb"].image.ravel()) == {12}
        np.testing.assert_allclose(page.observations.clouds["points"].points, 2.25)
        assert (page.observations.clouds["points"].colors == 255).all()
        named = page.plots.actions.axes[1]
        assert named["values"] == ("left", "right", "wait") and named["splits"] == (0, 1, 2)
        last = viewer.session.episode.actions[-1][0]
        assert f"random · **{('left', 'right', 'wait')[int(last)]}**" in page.status.content


def test_a_world_that_refuses_its_scene_is_flat_and_says_why() -> None:
    class Elsewhere(toy_envs.Reach):
        def sub_scene(self, row: int) -> None:
            raise ValueError("rows are in other processes")

    pytest.importorskip("sapien", reason="SAPIEN is not installed (extra: maniskill)")
    with Viewer(alone(Elsewhere(1)), port=0) as viewer:
        assert viewer.page.scene is None
        assert "No 3D scene: rows are in other processes" in viewer.page.status_text()


def test_pictures_of_images_stacks_and_depth() -> None:
    pixel = torch.arange(6, dtype=torch.uint8).expand(2, 2, 6)
    stacked = picture_of(pixel, Leaf((2, 2, 6), "uint8", 0, 255))
    assert stacked.shape == (160, 160, 3) and stacked[0, 0].tolist() == [3, 4, 5]
    grey = picture_of(pixel[..., :1] + 9, Leaf((2, 2, 1), "uint8", 0, 255))
    assert grey[0, 0].tolist() == [9, 9, 9]
    depth = torch.full((16, 16, 1), 3.0)
    depth[0, 0], depth[15, 15], depth[7, 7] = 1.0, 5.0, float("inf")
    leaf = Leaf((16, 16, 1), unit="m")
    assert is_picture(leaf) and not is_picture(Leaf((16, 3)))
    shown = picture_of(depth, leaf)
    # From 0 (what is not finite) to 5 m: 255 * 3 / 5 = 153.
    assert (shown[50, 10, 0], shown[-1, -1, 0], shown[75, 75, 0]) == (153, 255, 0)
    assert not is_picture(Leaf((7, 7, 3), "uint8", 0, 10, unit="symbol"))


def test_clouds_have_the_colours_of_their_columns() -> None:
    row = torch.tensor([[1.0, 2.0, 3.0, 1.0, 0.5, -1.0]])
    places, colours = cloud_of(row)
    assert places.tolist() == [[1.0, 2.0, 3.0]] and colours.tolist() == [[255, 128, 0]]
    assert cloud_of(row[:, :3])[1].shape == (1, 3)
