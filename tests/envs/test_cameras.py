"""Cameras: films are as good as the scene says, observations cost what a policy needs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator

import mujoco
import numpy as np
import pytest
import torch

from embodied.embodiments import fr3
from embodied.envs.fr3.base import RenderScene, TaskInstance
from embodied.envs.fr3.env import Config, Fr3
from embodied.envs.mujoco.cameras import Cameras, decimate

SCENE = """
<mujoco>
  <visual><quality shadowsize="1024" offsamples="8"/></visual>
  <asset>
    <mesh name="ball" builtin="sphere" params="4"/>
    <material name="mirror" reflectance="0.8" rgba=".5 .5 .5 1"/>
  </asset>
  <worldbody>
    <light pos="0 0 3" dir="0 0 -1" castshadow="true"/>
    <camera name="eye" pos="0 -2 1.2" xyaxes="1 0 0 0 .5 .86" fovy="60"/>
    <geom type="plane" size="2 2 .1" material="mirror"/>
    <geom type="mesh" mesh="ball" pos="0 0 .6" rgba="1 0 0 1"/>
    <geom type="box" size=".1 .1 .1" pos=".5 -.3 .1" rgba="0 0 1 1"/>
  </worldbody>
</mujoco>
"""


@pytest.fixture
def scene() -> Iterator[tuple[Cameras, mujoco.MjModel, mujoco.MjData]]:
    cameras, model = Cameras(("eye",), 64), mujoco.MjModel.from_xml_string(SCENE)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    yield cameras, model, data
    cameras.close()


def red(picture: np.ndarray) -> np.ndarray:
    """Which pixels show something red, [height, width] (bool)."""
    values = picture.astype(int)
    return (values[..., 0] > 60) & (values[..., 0] > 2 * values[..., 1:].max(-1))


def test_an_observation_has_no_shadow_and_no_reflection(scene) -> None:
    cameras, model, data = scene
    film = cameras.picture(model, data, "eye", 64, 64).astype(int)
    seen = cameras.observe([(model, data)])["eye"][0]
    assert ((seen.mean(-1) - film.mean(-1)) > 30).sum() > 60, "the shadow of the ball"
    assert red(film)[40:].sum() > 60 and not red(seen)[50:].any(), "its mirror image"
    upper, shown = red(film)[:34], red(seen)[:34]
    assert (upper ^ shown).sum() < 0.06 * upper.sum(), "the ball itself"


def test_a_film_is_what_it_was_before_an_observation(scene) -> None:
    cameras, model, data = scene
    before = cameras.picture(model, data, "eye", 64, 64)
    fields = {name: getattr(model, name).copy() for name in ("mesh_face", "mesh_facenum")}
    cameras.observe([(model, data)])
    depth = cameras.depth(model, data, "eye", 64, 64)
    assert all((getattr(model, name) == value).all() for name, value in fields.items())
    assert (model.vis.quality.shadowsize, model.vis.quality.offsamples) == (1024, 8)
    after = Cameras((), 0)
    assert (after.picture(model, data, "eye", 64, 64) == before).all()
    after.close()
    assert np.isfinite(depth).all() and depth.min() > 0.5


def test_the_robot_is_drawn_with_a_tenth_of_its_triangles() -> None:
    """And looks like the whole one, drawn as cheaply otherwise."""
    given = TaskInstance("lift", "sparse", {})
    middle = given.native(np.full((1, len(given.parameters)), 0.5))
    model, data = RenderScene(given.task).shaped(middle)
    data.qpos[:7] = fr3.HOME
    mujoco.mj_forward(model, data)
    cameras, whole = Cameras(("front", "wrist"), 96), int(model.mesh_facenum.sum())
    seen = cameras.observe([(model, data)])
    model.vis.quality.shadowsize, model.vis.quality.offsamples = 0, 4
    for name, (picture,) in seen.items():
        film = cameras.picture(model, data, name, 96, 96)
        assert np.abs(film.astype(int) - picture).mean() < 2.0
    for mesh in range(model.nmesh):
        decimate(model, mesh, 20)
    assert model.mesh_facenum.sum() < whole / 10 and model.mesh_facenum.min() > 0
    cameras.close()


FIRST = """
import hashlib, torch
from embodied.envs.fr3.env import Config, Fr3
env = Fr3(Config(num_envs=1, threads=1, cameras=("front", "wrist"), image_size=48))
env.reset(5)
obs = env.step(torch.full((1, 4), 0.5)).obs
print(hashlib.sha256(torch.cat([obs["front"], obs["wrist"]]).numpy().tobytes()).hexdigest())
"""


def test_a_state_has_one_picture_in_every_process_and_beside_other_envs() -> None:
    env = Fr3(Config(num_envs=3, threads=1, cameras=("front", "wrist"), image_size=48))
    env.reset(5)
    env.render(2, 64, 48)  # a film beside it changes nothing
    obs = env.step(torch.full((3, 4), 0.5)).obs
    env.close()
    here = torch.cat([obs["front"][:1], obs["wrist"][:1]]).numpy().tobytes()
    command = [sys.executable, "-c", FIRST]
    there = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert hashlib.sha256(here).hexdigest() == there


def test_an_observation_shows_colours_and_follows_the_light() -> None:
    look = {"light": (0.3, 1.0)}
    env = Fr3(Config(num_envs=2, threads=1, cameras=("front",), image_size=96, randomize=look))
    task = torch.full((2, 6), 0.5)
    task[:, -1] = torch.tensor([0.0, 1.0])
    dark, bright = env.reset(0, task=task)["front"].numpy()
    env.close()
    assert red(bright)[30:].sum() >= 6, "the cube"
    assert dark.mean() < 0.7 * bright.mean()
