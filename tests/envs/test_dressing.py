"""Dressing by hand: the threading test, progress along the arm, what hides points, rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.spec import DEMONSTRATOR
from embodied.envs.mujoco import dressing
from embodied.envs.mujoco.dressing import AROUND, LENGTHS, WHICH, Config, Dressing

# Shoulder, elbow, wrist, fingertip of an arm that is bent by a right angle at the elbow.
BENT = np.array([[[0, 0, 0], [0.28, 0, 0], [0.28, 0.25, 0], [0.28, 0.37, 0]]], np.float64)


def ring(middle: Sequence[float], out: Sequence[float], radius: float = 0.07) -> np.ndarray:
    """A round opening [1, AROUND, 3] that looks to `out`, the way in which the arm leaves it."""
    axis = np.array(out)
    up = np.array([0.0, 0.0, 1.0])
    side = np.cross(up, axis)
    angle = 2 * np.pi * np.arange(AROUND)[:, None] / AROUND
    return np.array(middle) + radius * (np.cos(angle) * up - np.sin(angle) * side)[None]


def through(opening: np.ndarray, arm: np.ndarray = BENT) -> tuple[float, bool]:
    s, once = dressing.passed(opening, arm)
    return float(s[0]), bool(once[0])


def test_the_opening_at_rest_looks_to_where_the_arm_leaves_it() -> None:
    """At rest, the sleeve's opening looks to -x and its tube is at +x."""
    assert np.allclose(ring([0, 0, 0], [-1, 0, 0], dressing.WIDE)[0], dressing.tube()[:AROUND])


def test_progress_along_two_parts_of_the_arm() -> None:
    """Half of the forearm: 0.12 + 0.125. A quarter of the upper arm: 0.12 + 0.25 + 0.07."""
    s, once = through(ring([0.29, 0.125, 0.01], [0, -1, 0]))
    assert once and s == pytest.approx(0.245)
    s, once = through(ring([0.21, 0, 0.02], [-1, 0, 0]))
    assert once and s == pytest.approx(0.44)


def test_beyond_the_shoulder_the_whole_arm_is_dressed() -> None:
    s, once = through(ring([-0.1, 0, 0], [-1, 0, 0]))
    assert once and s == pytest.approx(sum(LENGTHS))


def test_sleeves_that_are_not_threaded() -> None:
    """Above the arm, before the fingertip, passed from behind, and in a fold passed twice."""
    assert not through(ring([0.29, 0.125, 0.08], [0, -1, 0]))[1]
    assert not through(ring([0.28, 0.4, 0], [0, -1, 0]))[1]
    assert not through(ring([0.29, 0.125, 0.01], [0, 1, 0]))[1]
    # An opening that lies over the bent elbow: the arm goes in and comes out again.
    middle, out = [0.25, 0.03, 0.0], [-math.sqrt(0.5), -math.sqrt(0.5), 0.0]
    assert through(ring(middle, out))[1]
    assert not through(ring(middle, [-math.sqrt(0.5), math.sqrt(0.5), 0.0]))[1]


def test_distances_from_two_capsules() -> None:
    """0.05 above the middle of the upper arm; 0.03 beyond the fingertip."""
    points = np.array([[[0.14, 0, 0.05], [0.28, 0.40, 0.0]]])
    gap, share = dressing.to_line(points, BENT)
    assert gap[0, 0, 0] == pytest.approx(0.05) and share[0, 0, 0] == pytest.approx(0.5)
    assert gap[0, 1].min() == pytest.approx(0.03) and share[0, 1, 2] == 1


def test_the_joints_by_hand() -> None:
    """Straight ahead with an elbow at a right angle; then the upper arm up by 30 degrees."""
    joints, _ = dressing.posed(np.array([[0, math.pi / 2, 0], [math.pi / 6, 0, 0]]))
    assert np.allclose(joints[:1], BENT)
    assert joints[1, 3].tolist() == pytest.approx([0.65 * math.cos(math.pi / 6), 0, 0.325])


def test_the_cloth_hides_what_is_behind_it() -> None:
    """A tube along x, seen from -y: points at its axis are behind its near side; a point before it,
    one beside its end and its own vertices are not."""
    rest = dressing.tube()[None]
    eye = np.array([0.05, -1.0, 0.0])
    points = np.array([[[0.05, 0, 0], [0.05, -0.2, 0], [-0.1, 0, 0], [0.05, 0.5, 0]]])
    assert dressing.behind(points, rest, eye)[0].tolist() == [True, False, False, True]
    own = dressing.behind(rest, rest, eye)[0].reshape(-1, AROUND)
    assert not own[:, 9].any() and own[1:-1, 3].all()  # at -y and +y


def made(**settings: Any) -> Dressing:
    return Dressing(Config(num_envs=2, threads=1, **settings))


def test_the_arm_hides_its_own_back() -> None:
    env = made(observe=("points", "full"), regions=(13,))
    obs = env.reset(0)
    rows = np.arange(2)
    points = env.surfaces(rows, env.batch.mocap_pos[:, 3])
    seen = env.visible(rows, points)
    arm = points[:, -32:]  # of the hand
    share = dressing.to_line(arm, env.arm)[1][..., 2:]
    axis = env.arm[:, None, 2] + share * (env.arm[:, None, 3] - env.arm[:, None, 2])
    to_eye = (dressing.EYE - axis) / np.linalg.norm(dressing.EYE - axis, axis=2, keepdims=True)
    towards = ((arm - axis) * to_eye).sum(2)
    assert not seen[:, -32:][towards < -0.01].any() and (towards < -0.01).any()
    assert 0.1 < seen.mean() < 0.8
    assert obs["points"].shape == obs["full"].shape == (2, 96, 6)
    assert torch.equal(obs["points"][:, 0], torch.tensor([0, 0, 0, 0, 0, 1.0]).expand(2, -1))


@pytest.mark.parametrize("count", [48, 160])
def test_a_cloud_is_of_seen_points_with_their_class(count: int) -> None:
    env = made(regions=(13,), points=count)
    obs = env.reset(0)
    rows = np.arange(2)
    gripper = env.batch.mocap_pos[:, 3]
    points = env.surfaces(rows, gripper)
    seen = env.visible(rows, points)
    kinds = np.array([2, *[0] * len(env.rest), *[1] * 96])
    for row in rows:
        at = obs["points"][row, :, :3].numpy() + gripper[row]
        near = np.linalg.norm(at[:, None] - points[row], axis=2).argmin(1)
        assert seen[row, near].all() and len(set(near)) == min(count, seen[row].sum())
        assert (obs["points"][row, :, 3:].argmax(1).numpy() == kinds[near]).all()


def test_regions_cut_the_angles_into_thirds() -> None:
    """Region 14 = 9 + 3 + 2: the middle thirds of the first two angles, the last of the third."""
    env = made(observe=("state",), regions=(0, 14))
    obs = env.reset(0, task=torch.tensor([[0.7, 0.5, 0.5, 0.5], [0.2, 0.0, 0.0, 0.0]]))
    up, bent, forearm = -0.15, 0.8, -0.3 + 0.9 * 2.5 / 3
    low = [angle[0] for angle in dressing.ANGLES]
    expected, _ = dressing.posed(np.array([[up, bent, forearm], low]))
    assert np.allclose(env.arm, expected)
    assert obs[WHICH].tolist() == [[1], [0]]


def test_the_path_along_the_arm_dresses_it() -> None:
    env = made(observe=("state",), regions=(13,), play=True)
    obs = env.reset(0)
    total = torch.zeros(2)
    for _ in range(75):
        step = env.step(obs[DEMONSTRATOR])
        obs = step.obs
        total += step.reward
    assert step.log["dressed"].min() > 0.8 and step.log["success"].all()
    # 10 (0.37 + 5 s of the upper arm) at most, and what is paid for alignment.
    assert total.min() > 10 and total.max() < 10 * (0.37 + 5 * 0.28) + 75 * 0.02 + 1


def test_what_the_reward_pays() -> None:
    """An opening put from the middle of the forearm to 0.1 m beyond the elbow, centred, no force:
    10 (0.125 + 5 * 0.1) + 0.02."""
    env = made(observe=("state",), regions=(13,))
    env.reset(0)
    env.arm[:] = BENT
    env.batch.mocap_pos[:, 3] = (0, 0, 0.5)
    for middle, out in (([0.285, 0.125, 0.01], [0, -1, 0]), ([0.18, 0.005, 0.01], [-1, 0, 0])):
        opening = ring(middle, out) - env.rest[:AROUND]
        env.batch.qpos[:, : 3 * AROUND] = opening.reshape(1, -1)
        outcome = env.outcome(np.zeros((2, 5)))
    touch = env.batch.sensordata.sum(1)
    assert np.allclose(outcome.reward, 6.27 - 0.01 * touch, atol=1e-6)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"some of 0\.\.26"):
        made(regions=(27,))
    with pytest.raises(ConfigError, match="what is observed"):
        made(observe=())
