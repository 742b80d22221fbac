"""Grasping scenes: rays, antipodal grasps, placements and labels, by hand."""

import numpy as np
import pytest
import torch

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.embodiments.fr3 import OPEN
from embodied.envs.grasping import solids
from embodied.envs.grasping.env import Config, GraspingScenes
from embodied.envs.grasping.solids import Solids

DOWN = np.array([0.0, 0.0, -1.0])
Y = np.array([0.0, 1.0, 0.0])


def cube_and(*more: tuple[tuple[float, float, float], tuple[float, float, float]]) -> Solids:
    """A cube of 4 cm at x = 0.5, and further boxes (half sides, centre), each its own object."""
    boxes = [((0.02, 0.02, 0.02), (0.5, 0.0, 0.02)), *more]
    half = np.array([box[0] for box in boxes])
    centre = np.array([box[1] for box in boxes])
    count = len(boxes)
    return Solids(np.zeros(count, np.bool_), half, centre, np.zeros(count), np.arange(count))


def grasp(scene: Solids, place: tuple[float, float, float], closing=Y, width=0.04) -> bool:
    turn = solids.frames(np.array([closing]), DOWN[None])
    return bool(solids.antipodal(scene, np.array([place]), turn, np.array([width]))[0])


def test_rays_meet_boxes_and_cylinders() -> None:
    scene = cube_and(((0.03, 0.03, 0.05), (0.8, 0.0, 0.05)))
    scene.round[1] = True
    origin = np.array([[0.0, 0.0, 0.02], [2.0, 0.0, 0.09], [0.5, 0.0, 1.0], [0.0, 0.5, 0.02]])
    ray = np.array([[1.0, 0, 0], [-1.0, 0, 0], [0, 0, -1.0], [1.0, 0, 0]])
    reach, which, normal = scene.cast(origin, ray)
    np.testing.assert_allclose(reach[:3], [0.48, 1.17, 0.96])
    assert np.isinf(reach[3])
    assert which[:3].tolist() == [0, 1, 0]
    np.testing.assert_allclose(normal[:3], [[-1, 0, 0], [1, 0, 0], [0, 0, 1]], atol=1e-12)


def test_antipodal_on_a_cube() -> None:
    scene = cube_and()
    assert grasp(scene, (0.5, 0.0, 0.02))
    assert grasp(scene, (0.5, 0.0, 0.02), closing=-Y)  # the other order of the jaws
    skew = np.array([np.sin(0.7), np.cos(0.7), 0.0])  # 40 degrees: outside of a cone of 27
    assert not grasp(scene, (0.5, 0.0, 0.02), closing=skew)
    assert not grasp(scene, (0.53, 0.0, 0.02))  # beside it
    assert not grasp(scene, (0.5, 0.0, 0.005))  # the fingertips are in the table
    assert not grasp(scene, (0.5, 0.0, 0.02), width=0.01)  # the hand is not opened far enough


def test_what_is_in_the_way_forbids_a_grasp() -> None:
    beside = ((0.01, 0.01, 0.02), (0.5, 0.035, 0.02))  # where a finger goes
    assert not grasp(cube_and(beside), (0.5, 0.0, 0.02))
    tall = ((0.01, 0.01, 0.06), (0.5, 0.075, 0.06))  # below the palm only, which is 20 cm wide
    assert not grasp(cube_and(tall), (0.5, 0.0, 0.02))
    wide = Solids(*(getattr(cube_and(), f) for f in ("round", "half", "centre", "yaw", "owner")))
    wide.half[0, 1] = 0.045
    assert not grasp(wide, (0.5, 0.0, 0.02), width=0.08)


def test_labels_of_a_cube_are_grasps() -> None:
    scene = cube_and()
    points = np.array([[0.5, -0.02, 0.02], [0.5, 0.0, 0.04], [0.6, 0.0, 0.0]])
    normal = np.array([[0, -1.0, 0], [0, 0, 1.0], [0, 0, 1.0]])
    label = solids.contact_labels(scene, points, np.array([0, 0, -1]), normal)
    np.testing.assert_allclose(label[0], [1, 0, 1, 0, 0, 0, -1, 0.04], atol=1e-9)
    assert not label[1:].any()


def test_free_places_keep_a_centimetre() -> None:
    scene = cube_and()
    held = np.array([[x, y, 0.0] for x in (-0.01, 0.01) for y in (-0.01, 0.01)])
    place = np.array([[0.5, 0.045, 0.0], [0.5, 0.035, 0.0], [0.5, 0.295, 0.0], [0.7, 0.0, 0.1]])
    low, high = np.array([0.3, -0.3]), np.array([0.7, 0.3])
    free = solids.free_places(scene, held, place, np.zeros(4), low, high)
    assert free.tolist() == [True, False, False, False]


@pytest.mark.parametrize("placing", [0.0, 1.0])
def test_labelled_actions_succeed(placing: float) -> None:
    env = GraspingScenes(Config(num_envs=4, placing=placing, seed=2))
    obs = env.reset(seed=2)
    action = torch.zeros(4, 10)
    some = torch.zeros(4, dtype=torch.bool)
    for row in range(4):
        label = obs["privileged/contact"][row].double().numpy()
        free = obs["privileged/placement"][row].nonzero()
        points = obs["points"][row].double().numpy()
        if (good := np.flatnonzero(label[:, 0])).size:
            one = label[good[0]]
            place = points[good[0]] + one[7] / 2 * one[1:4]
            turn = solids.frames(one[None, 1:4], one[None, 4:7])
        elif len(free):
            index, number = free[0].tolist()
            place = points[index]
            yaw = 2 * np.pi * number / 8
            x = np.array([np.cos(yaw), np.sin(yaw), 0.0])
            turn = solids.frames(np.cross(DOWN, x)[None], DOWN[None])
            one = np.zeros(8)
        else:
            continue
        action[row, :9] = torch.from_numpy(env.pose.encode(place[None], turn)[0])
        action[row, 9] = 2 * one[7] / OPEN - 1
        some[row] = True
    assert some.any()
    assert (env.step(action).log["success"][some]).all()


def test_held_out_shapes_are_others() -> None:
    env = GraspingScenes(Config(num_envs=1, shapes="held_out"))
    assert env._kinds(np.array([0.0, 0.999])).tolist() == [15, 19]


def test_clutter_takes_the_shapes() -> None:
    node = {"_target_": "embodied.envs.fr3.env.Fr3", "task": "clutter", "num_envs": 1}
    env = build(node, VecEnv)
    env.reset(seed=0, task=torch.full((1, 5), 6.5 / 20))  # the seventh shape: a can
    sizes = env.batch.expand("geom_size")[0]  # pyright: ignore
    geom = env.model.geom("thing_0_can_0").id  # pyright: ignore
    np.testing.assert_allclose(sizes[geom], [0.018, 0.020, 0.0])
