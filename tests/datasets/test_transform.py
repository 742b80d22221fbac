"""Rotations in other representations, relative actions, clouds of depth pictures; what jumps where
nothing turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation as Reference

from embodied.commands.train import train
from embodied.core import checkpoint
from embodied.core.spec import DEPTH, POINTS, Leaf, Spec
from embodied.datasets.editing import transform
from embodied.datasets.editing.check import CheckConfig
from embodied.datasets.editing.edit import checked
from embodied.datasets.editing.rotations import NAMES, from_matrix, to_matrix
from embodied.datasets.editing.transform import Projection, Relation, Rotation, relative, rotate
from embodied.datasets.lerobot.reader import DatasetError, Episodes, EpisodeWriter, read_episodes
from embodied.serve.policy_service import PolicyService
from tests.builders import exit_of, recorded
from tests.datasets.test_foreign_columns import foreign

HALF_TURNS = [[np.pi, 0, 0], [0, -np.pi, 0], [0, 0, np.pi], [0, 0, 0], [1e-9, 0, 0]]
ANY = np.concatenate([np.random.default_rng(0).normal(0, 2, (500, 3)), HALF_TURNS])
SLOW = np.linspace(0, 3 * np.pi, 60)[:, None] * [0.6, 0.0, 0.8]
"""Rotation vectors at random, and one and a half turns in small steps."""


def reference(vectors: np.ndarray, kind: str) -> np.ndarray:
    """The rotations in the representation, by SciPy."""
    turn = Reference.from_rotvec(vectors)
    matrix = turn.as_matrix()
    return {
        "quaternion": turn.as_quat(canonical=True),
        "quaternion_wxyz": turn.as_quat(canonical=True, scalar_first=True),
        "6d": np.concatenate([matrix[:, :, 0], matrix[:, :, 1]], 1),
        "6d_rows": np.concatenate([matrix[:, 0], matrix[:, 1]], 1),
        "vector": turn.as_rotvec(),
        "euler": turn.as_euler("xyz"),
    }[kind]


@pytest.mark.parametrize("kind", NAMES)
def test_a_representation_and_its_inverse(kind: str) -> None:
    matrix = Reference.from_rotvec(ANY).as_matrix()
    np.testing.assert_allclose(to_matrix(reference(ANY, kind), kind), matrix, atol=1e-9)
    written = from_matrix(matrix, kind)
    assert written.shape[1] == len(NAMES[kind])
    np.testing.assert_allclose(to_matrix(written, kind), matrix, atol=1e-7)


@pytest.mark.parametrize("kind", NAMES)
def test_a_slow_turn_makes_no_jump(kind: str) -> None:
    written = from_matrix(Reference.from_rotvec(SLOW).as_matrix(), kind)
    most = 0.9 if kind == "euler" else 0.2  # a turn near the poles of Euler angles
    assert np.abs(np.diff(written, axis=0)).max() < most
    if kind == "vector":
        np.testing.assert_allclose(written, SLOW, atol=1e-7)
    # SciPy's own numbers of the same turn do jump: this test can fail.
    if not kind.startswith("6d"):
        assert np.abs(np.diff(reference(SLOW, kind), axis=0)).max() > 1


POSE = ("x", "y", "z", "left.qx", "left.qy", "left.qz", "left.qw", "width")


def pose_rows(vectors: np.ndarray, seed: int) -> np.ndarray:
    """[T, 8]: places at random, quaternions as SciPy gives them, an opening."""
    random = np.random.default_rng(seed)
    places, width = random.normal(size=(len(vectors), 3)), random.uniform(0, 1, (len(vectors), 1))
    return np.concatenate([places, reference(vectors, "quaternion"), width], 1)


@pytest.fixture
def poses(tmp_path: Path) -> Path:
    """Two episodes of absolute tool poses as states and actions, in physical units."""
    spec = Spec({"state": Leaf((8,), names=POSE)}, Leaf((8,), names=POSE), dt=0.1)
    with EpisodeWriter(tmp_path / "poses", spec) as writer:
        for number, turn in enumerate((SLOW, ANY)):
            state = torch.from_numpy(pose_rows(turn, number)).float()
            ahead = torch.from_numpy(pose_rows(turn[::-1], 9)).float()
            writer.add(recorded({"state": state}, ahead[:-1]))
    return tmp_path / "poses"


def turns(values: torch.Tensor, first: int, kind: str) -> np.ndarray:
    return to_matrix(values[:, first : first + len(NAMES[kind])].numpy(), kind)


@pytest.mark.parametrize("kind", ["6d", "6d_rows", "vector", "euler", "quaternion_wxyz"])
def test_a_dataset_with_another_representation(poses: Path, tmp_path: Path, kind: str) -> None:
    for column, key in (("action", "action"), ("observation.state", "obs/state")):
        there, back = tmp_path / f"{key[:3]}_there", tmp_path / f"{key[:3]}_back"
        rotate(poses, there, Rotation(column, "quaternion", kind, 3))
        was, now = read_episodes(poses), read_episodes(there)
        leaf = now.spec.act if key == "action" else now.spec.obs["state"]
        names = tuple(f"left.{name}" for name in NAMES[kind])
        assert leaf == Leaf((4 + len(names),), names=(*POSE[:3], *names, "width"))
        for episode in range(2):
            old, new = was.episode(episode), now.episode(episode)
            keys = [key] if key == "action" else [key, "next_obs/state"]
            for each in keys:
                a, b = (v.reshape(-1, v.shape[-1]) for v in (old[each], new[each]))
                np.testing.assert_allclose(turns(b, 3, kind), turns(a, 3, "quaternion"), atol=1e-5)
                assert torch.equal(a[:, :3], b[:, :3]) and torch.equal(a[:, 7], b[:, -1])
        stats = json.loads((there / "meta/stats.json").read_text())[column]
        rows = now.steps[key].numpy()
        np.testing.assert_allclose(stats["mean"], rows.mean(0), atol=1e-5)
        np.testing.assert_allclose(stats["max"], rows.max(0), atol=1e-6)
        rotate(there, back, Rotation(column, kind, "quaternion", 3))
        again = read_episodes(back)
        assert again.spec == was.spec
        same = (turns(e.steps[key], 3, "quaternion") for e in (again, was))
        np.testing.assert_allclose(*same, atol=1e-5)
        assert not [f for f in checked(back, CheckConfig())[0] if column.split(".")[-1] in f.what]


def absolute_poses(episodes: Episodes) -> np.ndarray:
    """Poses of the actions [N, 4, 4], and the states'."""
    made = np.tile(np.eye(4), (2, len(episodes.steps["action"]), 1, 1))
    for at, key in enumerate(("action", "obs/state")):
        made[at, :, :3, :3] = turns(episodes.steps[key], 3, "quaternion")
        made[at, :, :3, 3] = episodes.steps[key][:, :3].numpy()
    return made


def test_relative_poses_are_in_the_frame_of_the_state(poses: Path, tmp_path: Path) -> None:
    how = Relation(keep=("width",), rotation="quaternion")
    relative(poses, tmp_path / "relative", how)
    was, now = read_episodes(poses), read_episodes(tmp_path / "relative")
    wanted, state = absolute_poses(was)
    difference = np.linalg.inv(state) @ wanted
    moved = now.steps["action"]
    np.testing.assert_allclose(moved[:, :3], difference[:, :3, 3], atol=1e-5)
    np.testing.assert_allclose(turns(moved, 3, "quaternion"), difference[:, :3, :3], atol=1e-5)
    assert torch.equal(moved[:, 7], was.steps["action"][:, 7])
    assert now.spec.act.names == (*(f"relative.{name}" for name in POSE[:7]), "width")
    with pytest.raises(DatasetError, match="the actions are relative already"):
        relative(tmp_path / "relative", tmp_path / "x", how)
    relative(tmp_path / "relative", tmp_path / "back", how, back=True)
    again = read_episodes(tmp_path / "back")
    assert again.spec == was.spec
    np.testing.assert_allclose(absolute_poses(again)[0], wanted, atol=2e-5)


def test_relative_joints_are_joined_by_name(tmp_path: Path) -> None:
    joints = Spec(
        {"state": Leaf((3,), names=("a.pos", "grip.pos", "b.pos"))},
        Leaf((3,), names=("b.pos", "a.pos", "grip.pos")),
        dt=0.1,
    )
    state, action = torch.randn(9, 3), 90 * torch.randn(8, 3)
    with EpisodeWriter(tmp_path / "arm", joints) as writer:
        writer.add(recorded({"state": state}, action))
    out = tmp_path / "out"
    assert exit_of("demos", "relative", tmp_path / "arm", "keep=grip.pos", f"out={out}") == 0
    moved = read_episodes(out).steps["action"]
    torch.testing.assert_close(moved[:, :2], action[:, :2] - state[:8, [2, 0]])
    assert torch.equal(moved[:, 2], action[:, 2])
    assert exit_of("demos", "absolute", out, f"out={tmp_path / 'back'}") == 0
    torch.testing.assert_close(read_episodes(tmp_path / "back").steps["action"], action)
    unnamed = Spec({"state": Leaf((3,), names=("a", "b", "c"))}, Leaf((3,)), dt=0.1)
    with EpisodeWriter(tmp_path / "unnamed", unnamed) as writer:
        writer.add(recorded({"state": state}, action))
    relative(tmp_path / "unnamed", tmp_path / "by_place", Relation())
    moved = read_episodes(tmp_path / "by_place").steps["action"]
    torch.testing.assert_close(moved, action - state[:8])


def test_mistakes_are_one_line(poses: Path, tmp_path: Path) -> None:
    cases = [
        (Rotation("acton", "vector", "6d"), r'has no vector acton \(did you mean "action"\?\)'),
        (Rotation("action", "quaternion", "6d"), "action has 8 elements: first=N, where the 4"),
        (Rotation("action", "6d", "vector", 4), "action has no elements 4 to 9"),
        (Rotation("action", "quaternion", "6d", 2), "action of episode 0: step .* of length 1"),
    ]
    for rotation, line in cases:
        with pytest.raises(DatasetError, match=line):
            rotate(poses, tmp_path / "out", rotation)
        assert not (tmp_path / "out").exists()
    with pytest.raises(DatasetError, match=r'quaternoin is no way .*did you mean "quaternion"'):
        Rotation("action", "quaternoin", "6d")
    with pytest.raises(DatasetError, match="the action has no element widht"):
        relative(poses, tmp_path / "out", Relation(keep=("widht",)))
    unit = Spec({"state": Leaf((4,))}, Leaf((4,), low=-1.0, high=1.0), dt=0.1)
    with EpisodeWriter(tmp_path / "unit", unit) as writer:
        writer.add(recorded({"state": torch.randn(4, 4)}, torch.zeros(3, 4)))
    with pytest.raises(DatasetError, match=r"actions are in \[-1, 1\], not in physical units"):
        rotate(tmp_path / "unit", tmp_path / "out", Rotation("action", "quaternion", "6d"))


def test_sign_flips_and_wraps_are_found(tmp_path: Path) -> None:
    """A quaternion's other sign, and a wrist that turns over half a turn."""
    quaternion = reference(SLOW, "quaternion")
    quaternion[30:] *= -1
    wrist = (np.linspace(90, 270, 60) + 180) % 360 - 180
    state = np.concatenate([quaternion, wrist[:, None], np.deg2rad(wrist)[:, None]], 1)
    names = ("qx", "qy", "qz", "qw", "wrist.pos", "rad")
    spec = Spec({"state": Leaf((6,), names=names)}, Leaf((1,)), dt=0.1)
    with EpisodeWriter(tmp_path / "turns", spec) as writer:
        obs = {"state": torch.from_numpy(state).float()}
        writer.add(recorded(obs, torch.arange(59.0)[:, None]))
    found = [(f.frame, f.what) for f in checked(tmp_path / "turns", CheckConfig())[0]]
    at = int(np.flatnonzero(np.abs(np.diff(wrist)) > 300)[0]) + 1
    flip = int(np.flatnonzero((quaternion[1:] * quaternion[:-1]).sum(1) < 0)[0]) + 1
    assert found == [
        (flip, "observation.state[qx] and the next 3: the quaternion changes its sign"),
        (at, "observation.state[wrist.pos] jumps by a turn (360 degrees)"),
        (at, "observation.state[rad] jumps by a turn (6.283 rad)"),
    ]


AHEAD = np.array([[0, 0, 1], [-1, 0, 0], [0, -1, 0]])
"""The rotation of a camera that looks along x of the base with z up."""
H, W = 24, 32
SIGHT: dict[str, Any] = {"fx": 40.0, "fy": 42.0, "cx": 15.5, "cy": 11.0}


def looking_down() -> tuple[float, ...]:
    """The pose of a camera 0.8 m above the table, 40 degrees below the horizon, tilted a little."""
    turn = Reference.from_euler("xyz", [0.1, 0.7, 0.2]).as_matrix() @ AHEAD
    return (0.1, -0.2, 0.8, *Reference.from_matrix(turn).as_quat())


def ball_on_table(pose: tuple[float, ...], centre: np.ndarray, radius: float) -> np.ndarray:
    """The distances [H, W] of a ball on the table z = 0 along the viewing axis, 0 where a pixel
    sees neither within 1.8 m."""
    v, u = np.mgrid[:H, :W]
    ray = np.stack([(u - SIGHT["cx"]) / SIGHT["fx"], (v - SIGHT["cy"]) / SIGHT["fy"], 1 + 0 * u], 2)
    ray = ray @ Reference.from_quat(pose[3:]).as_matrix().T
    away = np.array(pose[:3]) - centre
    a, b, c = (ray**2).sum(2), ray @ away, away @ away - radius**2
    root = b**2 - a * c
    ball = np.where(root > 0, (-b - np.sqrt(np.maximum(root, 0))) / a, np.inf)
    down = np.where(ray[..., 2] < 0, -pose[2] / np.minimum(ray[..., 2], -1e-9), np.inf)
    metres = np.minimum(ball, down)
    return np.where(metres < 1.8, metres, 0).astype(np.float32)


def test_points_are_on_the_ball_and_on_the_table() -> None:
    pose, centre, radius = looking_down(), np.array([0.9, -0.1, 0.15]), 0.15
    depth = ball_on_table(pose, centre, radius)
    assert 0 < (depth == 0).sum() < 200
    every = Projection(**SIGHT, pose=pose, voxel=1e-4, points=H * W)
    cloud = every.clouds([depth])[0]
    assert len(np.unique(cloud, axis=0)) == (depth > 0).sum()
    off_ball = np.abs(np.linalg.norm(cloud - centre, axis=1) - radius)
    assert (off_ball < 1e-5).sum() > 30 and (np.abs(cloud[:, 2]) < 1e-5).sum() > 30
    assert np.minimum(off_ball, np.abs(cloud[:, 2])).max() < 1e-5
    box = Projection(**SIGHT, pose=pose, low=(0, -1, 0.01), high=(2, 1, 1), points=32, far=2.0)
    (first, again) = box.clouds([depth, depth])
    assert (first[:, 2] > 0.01).all() and np.array_equal(first, again)
    # The field of view of the same camera, if its axis is in the middle.
    fov = np.rad2deg(2 * np.arctan(H / 2 / 40))
    middle = Projection(fx=40, fy=40, cx=W / 2 - 0.5, cy=H / 2 - 0.5).clouds([depth])
    np.testing.assert_allclose(Projection(fov=fov).clouds([depth]), middle, atol=1e-6)


QUATERNION = tuple(Reference.from_matrix(AHEAD).as_quat().tolist())
MOUNT = (0.0, 0.0, 0.2, *QUATERNION)  # on a tool, 0.2 m above its point
WALL = 1.2  # m, x of the base


@pytest.fixture
def walls(tmp_path: Path) -> Path:
    """A camera on a tool that goes towards a wall; the upper half of a picture sees nothing. The
    second episode begins nearer."""
    leaves = {"eye": Leaf((H, W, 1), low=0.0, unit=DEPTH), "state": Leaf((8,), names=POSE)}
    with EpisodeWriter(tmp_path / "walls", Spec(leaves, Leaf((2,)), dt=0.1)) as writer:
        for begin in (0.1, 0.3):
            state, eye = torch.zeros(7, 8), torch.zeros(7, H, W, 1)
            state[:, 0] = begin + 0.05 * torch.arange(7)
            state[:, 6] = 1.0
            eye[:, H // 2 :] = (WALL - state[:, 0])[:, None, None, None]
            writer.add(recorded({"eye": eye, "state": state}, state[:-1, :2]), "look")
    return tmp_path / "walls"


@pytest.mark.parametrize("theirs", [False, True])
def test_a_dataset_of_depth_becomes_one_of_points(
    theirs: bool, walls: Path, tmp_path: Path
) -> None:
    """The wall stays where it is while the camera moves, and a policy is trained on it."""
    if theirs:
        foreign(walls)
    out = tmp_path / "out"
    sight = [f"{key}={value}" for key, value in SIGHT.items()]
    given = [f"pose={list(MOUNT)}", "frame=observation.state", "from=eye", "to=seen", "points=40"]
    assert exit_of("demos", "points", walls, *sight, *given, f"out={out}") == 0
    was, now = read_episodes(walls), read_episodes(out)
    assert now.spec.obs == {"state": was.spec.obs["state"], "seen": Leaf((40, 3), unit=POINTS)}
    every = torch.cat([now.steps["obs/seen"], now.final["seen"]]).view(-1, 3)
    torch.testing.assert_close(every[:, 0], torch.full((len(every),), WALL), atol=1e-5, rtol=0)
    assert (every[:, 2] <= 0.2).all(), "only the lower half of the pictures holds distances"
    for key in ("obs/state", "action"):
        assert torch.equal(now.steps[key], was.steps[key])
    stats = json.loads((out / "meta/stats.json").read_text())
    assert not {"observation.images.eye", "observation.seen"} & stats.keys()
    assert [f for f in checked(out, CheckConfig())[0] if "seen" in f.what] == []
    words = ("policy=flow", "learner=imitate", "size=debug", "steps=2", f"demos={out}")
    policy = checkpoint.load_policy(train([*words, f"out={tmp_path / 'run'}"]))
    assert policy.spec.obs["seen"].is_points
    # Where the policy acts: the same cloud of the same picture, and it is served.
    picture, state = was.steps["obs/eye"][3, ..., 0].numpy(), was.steps["obs/state"][3].numpy()
    alone = Projection(**SIGHT, pose=MOUNT, points=40).clouds([picture], state[None, :7])
    np.testing.assert_array_equal(alone[0], now.steps["obs/seen"][3].numpy())
    served = PolicyService(policy).infer({"state": state, "seen": alone[0]})
    assert served["actions"].shape[1] == 2
    foreign(out)
    assert read_episodes(out).spec.obs["seen"].is_points, "without our key, too"


def test_mistakes_about_cameras_are_one_line(walls: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "say what the camera sees: fx=, fy=, cx= and cy="),
        ({"fx": 40.0, "fov": 60.0}, "say what the camera sees"),
        ({"fov": 60.0, "pose": (0.0, 0.0, 1.0)}, "pose= has 3 numbers, not 7"),
        ({"fov": 60.0, "pose": (0.0,) * 7}, "pose=.* is not of length 1"),
        ({"fov": 60.0, "rotation": "quat"}, "quat is no way to write rotations"),
        (SIGHT | {"cx": 320.0}, "cx=320 cy=11 is not in a picture of 32 x 24: intrinsics are for"),
        ({"fov": 60.0, "frame": "observation.state", "first": 2}, "has no elements 2 to 8"),
        ({"fov": 60.0, "far": 0.65}, r"walls: observation.images.eye of episode 0: step 0: 0 poi"),
        ({"fov": 60.0, "near": 0.75}, r"images.eye of episode 1: step 4: 0 points are measured"),
    ]
    for settings, line in cases:
        with pytest.raises(DatasetError, match=line):
            transform.points(walls, tmp_path / "out", Projection(**settings))
        assert not (tmp_path / "out").exists()
    sight = Projection(fov=60)
    with pytest.raises(DatasetError, match="walls has no depth picture front: from=eye"):
        transform.points(walls, tmp_path / "out", sight, "front")
    with pytest.raises(DatasetError, match="has an observation state already"):
        transform.points(walls, tmp_path / "out", sight, name="state")
