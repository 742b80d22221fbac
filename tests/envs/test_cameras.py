"""Cameras: films, observations and depth at what they cost; clouds; machines without a display."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator

import mujoco
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from embodied.core.build import ConfigError
from embodied.core.point_cloud import Sampling, cloud, thinned, unproject
from embodied.embodiments import fr3
from embodied.envs.fr3.base import RenderScene, TaskInstance
from embodied.envs.fr3.env import Config, Fr3
from embodied.envs.mujoco.cameras import Cameras, decimate
from embodied.envs.wrappers import point_cloud

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
    assert np.isfinite(depth).all() and depth.min() > 0.5
    after = Cameras((), 0)
    assert (after.picture(model, data, "eye", 64, 64) == before).all()
    after.close()


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


HEADLESS = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "MUJOCO_GL")}
NO_EGL = """
import ctypes
real = ctypes.CDLL
class Without(real):
    def __init__(self, name=None, *rest, **more):
        if name and "EGL" in str(name):
            raise OSError("no such file")
        super().__init__(name, *rest, **more)
ctypes.CDLL = ctypes.cdll._dlltype = Without
import torch
from embodied.envs.fr3.env import Fr3
from embodied.core.build import build
from embodied.core.env import VecEnv
env = build({"_target_": "embodied.envs.fr3.env.Fr3", "num_envs": 1}, VecEnv)
env.reset(seed=0)
env.step(torch.zeros(1, env.spec.act.size))
try:
    env.render()
except Exception as error:
    print(type(error).__name__, error)
"""


def test_without_egl_environments_step_and_say_what_rendering_needs() -> None:
    """`import mujoco` with MUJOCO_GL=egl raises where EGL's library is missing."""
    ended = subprocess.run(
        [sys.executable, "-c", NO_EGL], env=HEADLESS, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("NoDisplay"), ended.stdout
    assert "install libegl1" in ended.stdout


BOX = Sampling(points=64, voxel=0.05, low=(0, 0, 0), high=(1, 1, 1))


def ordered(cloud: NDArray[np.float32]) -> NDArray[np.float64]:
    values = cloud.astype(np.float64).round(5)
    return cloud[np.lexsort(values.T[::-1])]


def test_a_pixel_is_a_ray() -> None:
    """Depth 2 m, focal length 4 px, principal point (1, 1): pixel (u, v) is seen at
    2 (u - 1/2) / 4, 2 (v - 1/2) / 4, 2 in the camera, here turned to look along base x."""
    matrix = torch.tensor([[[4.0, 0, 1], [0, 4, 1], [0, 0, 1]]])
    pose = torch.eye(4)[None].clone()
    # Camera x is base -y, camera y is base -z, camera z is base x.
    pose[0, :3, :3] = torch.tensor([[0.0, 0, 1], [-1, 0, 0], [0, -1, 0]])
    pose[0, :3, 3] = torch.tensor([10.0, 20, 30])
    points = unproject(torch.full((1, 2, 2), 2.0), matrix, pose)[0]
    expected = [[12, 20.25, 30.25], [12, 19.75, 30.25], [12, 20.25, 29.75], [12, 19.75, 29.75]]
    torch.testing.assert_close(points, torch.tensor(expected, dtype=torch.float64))


def test_voxels_and_farthest_points_by_hand() -> None:
    """The grid begins at 0.1 - 0.1 = 0: cells [0, .2), [.2, .4), ...; two points share the first.
    From the first cell's mean (0.12), the farthest is 0.9, then 0.5 (0.3 is the one left out)."""
    config = Sampling(points=3, voxel=0.2, low=(0, 0, 0), high=(1, 1, 1))
    x = torch.tensor([0.9, 0.1, 0.14, 0.3, 0.5, 5.0, torch.nan])
    points = torch.stack([x, torch.full_like(x, 0.5), torch.full_like(x, 0.5)], 1)[None]
    assert thinned(points, None, config)[0, :, 0].tolist() == pytest.approx([0.12, 0.5, 0.9])
    colours = x[None, :, None].expand(-1, -1, 3)
    assert thinned(points, colours, config)[0, :, 3].tolist() == pytest.approx([0.12, 0.5, 0.9])


def test_few_points_repeat_and_none_are_zeros() -> None:
    inside = torch.tensor([[[0.1, 0.1, 0.1], [0.9, 0.9, 0.9]], [[2.0, 2, 2], [0.2, 0.3, 0.4]]])
    both = thinned(torch.cat([inside, inside + 5]), None, BOX)
    assert both.shape == (4, 64, 3)
    assert [len(row.unique(dim=0)) for row in both[:2]] == [2, 1]
    torch.testing.assert_close(both[0, :4], inside[0].repeat(2, 1))
    assert not both[2:].any()
    one, none = (cloud(inside[0].double().numpy() + far, None, BOX) for far in (0, 5))
    np.testing.assert_allclose(one[:4], both[0, :4].numpy(), atol=1e-6)
    assert not none.any()


@pytest.mark.parametrize("colour", [False, True])
def test_open3d_and_torch_give_the_same_clouds(colour: bool) -> None:
    random = np.random.default_rng(0)
    points = random.uniform(-0.3, 1.3, (4, 3000, 3))
    points[1] *= 0.1  # fewer voxels than points asked for
    points[2, ::7] = np.nan
    shades = random.uniform(0, 1, points.shape) if colour else None
    given = None if shades is None else torch.from_numpy(shades)
    batch = thinned(torch.from_numpy(points), given, BOX).numpy()
    for row in range(4):
        single = cloud(points[row], None if shades is None else shades[row], BOX)
        assert single.shape == batch[row].shape == (64, 6 if colour else 3)
        np.testing.assert_allclose(ordered(single), ordered(batch[row]), atol=1e-5)
    assert len(np.unique(batch[0], axis=0)) == 64 > len(np.unique(batch[1], axis=0))


def test_depth_is_of_the_scene() -> None:
    """A wall 2 m ahead of the camera, a box in front of it whose face is 1.5 m away."""
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><light pos='0 0 1'/><camera name='eye' pos='0 0 1' "
        "xyaxes='0 -1 0 0 0 1' fovy='60'/><geom type='box' size='.1 3 3' pos='2.1 0 1'/>"
        "<geom type='box' size='.1 .1 .1' pos='1.6 .3 1.2'/></worldbody></mujoco>"
    )
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    cameras = Cameras((), 0)
    depth, eye = (read(model, data, "eye", 80, 60) for read in (cameras.depth, cameras.pinhole))
    cameras.close()
    assert eye.matrix[0, 0] == pytest.approx(30 / math.tan(math.radians(30)))
    given = (torch.from_numpy(each)[None] for each in (depth, eye.matrix, eye.pose))
    points = unproject(*given)[0]
    face, wall = points[points[:, 0] < 1.55], points[points[:, 0] > 1.75]
    assert (face[:, 0] - 1.5).abs().max() < 2e-3 and (wall[:, 0] - 2.0).abs().max() < 3e-3
    # The face's edges, to a pixel (1.5 m / 52 px = 2.9 cm).
    edges = torch.stack([face.amin(0)[1:], face.amax(0)[1:]])
    assert edges.numpy() == pytest.approx(np.array([[0.2, 1.1], [0.4, 1.3]]), abs=0.03)


@pytest.mark.parametrize("camera", ["front", "wrist"])
def test_a_camera_sees_the_cube_where_it_is(camera: str) -> None:
    seen = point_cloud.Config(
        cameras=(camera,), colour=True, voxel=0.004, points=600, size=96, by="torch"
    )
    env = Fr3(Config(num_envs=1, threads=1, drawing="light", clouds=seen))
    obs = env.reset(0, task=torch.full((1, 5), 0.5))
    # The tool starts anywhere; hold it above the cube so that the hand's camera sees it.
    action = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    for _ in range(12):
        action[0, :2] = (-obs["state"][0, 24:26] / 0.025).clamp(-1, 1)
        obs = env.step(action).obs
    env.close()
    points, cube, half = obs["points"][0], obs["state"][0, 21:24], float(obs["state"][0, 29])
    shown = (points[:, 3] > 0.3) & (points[:, 3] > 2 * points[:, 4])
    body = points[shown & (points[:, 2] < 0.1), :3]  # not the red light on the hand
    assert len(body) > 5
    assert (body[:, 2].max() - 2 * half).abs() < 0.004
    inside = (body - cube).abs().amax(1) < half * math.sqrt(2) + 0.005
    assert inside.float().mean() > 0.95


def test_the_cloud_of_a_row_that_ended_is_of_its_end() -> None:
    few = point_cloud.Config(points=64, size=32)
    env = Fr3(Config(num_envs=2, threads=1, horizon=2, drawing="light", clouds=few))
    env.reset(0)
    env.step(torch.zeros(2, 4))
    env.reset(mask=torch.tensor([False, True]))
    step = env.step(torch.zeros(2, 4))
    assert step.ended.tolist() == [True, False] and env.spec.obs["points"].is_points
    same = [torch.equal(step.next_obs["points"][row], step.obs["points"][row]) for row in (0, 1)]
    assert same == [False, True]
    env.close()


def test_wrong_settings_are_one_line() -> None:
    with pytest.raises(ConfigError, match="is empty"):
        Sampling(low=(1.0, 0, 0), high=(0.5, 1, 1))
    for cameras, says in (((), "at least one camera"), (("side",), "camera 'side'")):
        with pytest.raises(ValueError, match=says):
            Fr3(Config(num_envs=1, clouds=point_cloud.Config(cameras=cameras))).reset(0)
