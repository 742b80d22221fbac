"""Rotations in other representations and relative actions; what jumps where nothing turns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation as Reference

from embodied.core.spec import Leaf, Spec
from embodied.datasets.editing.check import CheckConfig
from embodied.datasets.editing.edit import checked
from embodied.datasets.editing.rotations import NAMES, from_matrix, to_matrix
from embodied.datasets.editing.transform import Relation, Rotation, absolute, relative, rotate
from embodied.datasets.lerobot.reader import DatasetError, Episodes, EpisodeWriter, read_episodes
from tests.builders import exit_of, recorded

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


def test_what_is_no_rotation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"step 1: \[0.1, 0.0, 0.0, 0.2\] is not of length 1"):
        to_matrix([[0, 0, 0, 1], [0.1, 0, 0, 0.2]], "quaternion")
    with pytest.raises(DatasetError, match=r'quaternoin is no way .*did you mean "quaternion"'):
        Rotation("action", "quaternoin", "6d")


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
        rotate(there, back, Rotation(column, kind, "quaternion", 3))
        again = read_episodes(back)
        assert again.spec == was.spec
        same = (turns(e.steps[key], 3, "quaternion") for e in (again, was))
        np.testing.assert_allclose(*same, atol=1e-5)
        assert not [f for f in checked(back, CheckConfig())[0] if column.split(".")[-1] in f.what]


def test_the_new_statistics_are_those_of_the_new_numbers(poses: Path, tmp_path: Path) -> None:
    rotate(poses, tmp_path / "out", Rotation("action", "quaternion", "6d", 3))
    stats = json.loads((tmp_path / "out/meta/stats.json").read_text())["action"]
    rows = read_episodes(tmp_path / "out").steps["action"].numpy()
    np.testing.assert_allclose(stats["mean"], rows.mean(0), atol=1e-5)
    np.testing.assert_allclose(stats["max"], rows.max(0), atol=1e-6)


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
    absolute(tmp_path / "relative", tmp_path / "back", how)
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
    words = [str(tmp_path / "arm"), "keep=grip.pos", f"out={tmp_path / 'out'}"]
    assert exit_of("demos", "relative", *words) == 0
    moved = read_episodes(tmp_path / "out").steps["action"]
    torch.testing.assert_close(moved[:, 0], action[:, 0] - state[:8, 2])
    torch.testing.assert_close(moved[:, 1], action[:, 1] - state[:8, 0])
    assert torch.equal(moved[:, 2], action[:, 2])
    assert exit_of("demos", "absolute", words[2][4:], f"out={tmp_path / 'back'}") == 0
    torch.testing.assert_close(read_episodes(tmp_path / "back").steps["action"], action)
    unnamed = Spec({"state": Leaf((3,), names=("a", "b", "c"))}, Leaf((3,)), dt=0.1)
    with EpisodeWriter(tmp_path / "unnamed", unnamed) as writer:
        writer.add(recorded({"state": state}, action))
    relative(tmp_path / "unnamed", tmp_path / "by_place", Relation())
    moved = read_episodes(tmp_path / "by_place").steps["action"]
    torch.testing.assert_close(moved, action - state[:8])
    absolute(tmp_path / "by_place", tmp_path / "unnamed_back", Relation())
    torch.testing.assert_close(read_episodes(tmp_path / "unnamed_back").steps["action"], action)


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
