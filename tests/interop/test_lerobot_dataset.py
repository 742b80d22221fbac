"""Datasets of LeRobot's own writer and reader and of ours; policies of either are the same."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.interop import need

need("lerobot")

from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402

from embodied.commands.eval import evaluate_run  # noqa: E402
from embodied.commands.train import train  # noqa: E402
from embodied.core.build import build  # noqa: E402
from embodied.core.env import VecEnv  # noqa: E402
from embodied.core.policy import Policy  # noqa: E402
from embodied.core.spec import Leaf  # noqa: E402
from embodied.core.tensors import Tensors  # noqa: E402
from embodied.datasets.collect import play  # noqa: E402
from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes  # noqa: E402

EPISODES, FPS, TASK = 30, 10, "pass the wall"
NUMBERS = {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}
FILM = {"dtype": "video", "shape": (64, 96, 3), "names": ["height", "width", "channels"]}
FEATURES = {"observation.state": NUMBERS, "action": NUMBERS}
MAPPING = "obs: {state: observation.state}\naction: {low: [-1, -1], high: [1, 1]}\n"
STEPS = ("steps=120", "learner.batch_size=64", "policy.width=64", "eval.episodes=20", "video=false")


def two_gap() -> VecEnv:
    return build({"_target_": "embodied.envs.toy.two_gap.TwoGap", "num_envs": 8}, VecEnv)


@pytest.fixture(scope="module")
def episodes() -> list[Tensors]:
    env = two_gap()
    node = {"_target_": "embodied.policies.scripted.two_gap.TwoGapDemonstrator"}
    return list(islice(play(build(node, Policy, spec=env.spec), env, 0), EPISODES))


@pytest.fixture(scope="module")
def theirs(episodes: list[Tensors], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstrations as LeRobot's writer records them."""
    folder = tmp_path_factory.mktemp("theirs") / "two_gap"
    dataset = LeRobotDataset.create("me/two_gap", FPS, FEATURES, root=folder, use_videos=False)
    for episode in episodes:
        for state, action in zip(episode["obs/state"], episode["action"], strict=True):
            frame = {"observation.state": state.numpy(), "action": action.numpy(), "task": TASK}
            dataset.add_frame(frame)
        dataset.save_episode()
    dataset.finalize()
    return folder


@pytest.fixture(scope="module")
def ours(episodes: list[Tensors], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours") / "two_gap"
    with EpisodeWriter(folder, two_gap().spec) as writer:
        for episode in episodes:
            writer.add(episode)
    return folder


def test_the_numbers_are_the_same(theirs: Path, ours: Path) -> None:
    here, there = read_episodes(ours), read_episodes(theirs)
    assert torch.equal(here.length, there.length)
    for key in ("obs/state", "action"):
        assert torch.equal(here.steps[key], there.steps[key])
    assert set(there.texts) == {TASK} and there.spec.dt == pytest.approx(0.1)
    assert there.spec.act.names == ("x", "y")


def test_a_policy_of_their_dataset_is_that_of_ours(
    theirs: Path, ours: Path, tmp_path: Path
) -> None:
    """In the environment, by a mapping: the same numbers, so the same weights and success."""
    mapping = tmp_path / "two_gap.yaml"
    mapping.write_text(MAPPING)
    words = ("env=two_gap", "policy=flow", "learner=imitate", *STEPS)
    there = train([*words, f"demos={theirs}", f"mapping={mapping}", f"out={tmp_path / 'a'}"])
    here = train([*words, f"demos={ours}", f"out={tmp_path / 'b'}"])
    a, b = (load_file(run / "checkpoints/00000120/policy.safetensors") for run in (there, here))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_policy_without_an_environment_is_too(theirs: Path, ours: Path, tmp_path: Path) -> None:
    """In physical units from the datasets' own statistics, then in the environment."""
    mapping = tmp_path / "two_gap.yaml"
    mapping.write_text(MAPPING)
    words = ("policy=flow", "learner=imitate", *STEPS)
    there = train([*words, f"demos={theirs}", f"out={tmp_path / 'a'}"])
    here = train([*words, f"demos={ours}", f"out={tmp_path / 'b'}"])
    acted = ["env=two_gap", f"mapping={mapping}", "episodes=40"]
    rows = [evaluate_run(there, acted, []), evaluate_run(here, acted, [])]
    assert abs(rows[0]["successes"] - rows[1]["successes"]) <= 0.02 * 40


def test_their_reader_reads_ours(ours: Path, episodes: list[Tensors]) -> None:
    dataset = LeRobotDataset("me/two_gap", root=ours, delta_timestamps={"action": [0.0, 0.1]})
    assert dataset.num_episodes == EPISODES and dataset.fps == FPS
    row = dataset[0]
    torch.testing.assert_close(row["observation.state"], episodes[0]["obs/state"][0])
    torch.testing.assert_close(row["action"], episodes[0]["action"][:2])


@pytest.fixture(scope="module")
def pictures() -> list[torch.Tensor]:
    """Two short films of smooth pictures, which lossy codecs keep."""
    ramp = torch.linspace(0, 200, 96).view(1, 1, 96, 1)
    shift = torch.arange(12).view(12, 1, 1, 1) * 4.0
    film = (ramp + shift).expand(12, 64, 96, 3).to(torch.uint8)
    return [film, film.flip(2).contiguous()]


def test_their_films_are_read(pictures: list[torch.Tensor], tmp_path: Path) -> None:
    folder = tmp_path / "filmed"
    features = {**FEATURES, "observation.images.top": FILM}
    dataset = LeRobotDataset.create("me/filmed", FPS, features, root=folder)
    for film in pictures:
        for picture in film:
            numbers = {key: np.zeros(2, np.float32) for key in FEATURES}
            dataset.add_frame({**numbers, "observation.images.top": picture.numpy(), "task": TASK})
        dataset.save_episode()
    dataset.finalize()
    read = read_episodes(folder)
    assert read.spec.obs["top"] == Leaf((64, 96, 3), "uint8", names=read.spec.obs["top"].names)
    found = read.steps["obs/top"][torch.arange(24)].float()
    assert (found - torch.cat(pictures).float()).abs().mean() < 4


def test_their_reader_reads_our_films(pictures: list[torch.Tensor], tmp_path: Path) -> None:
    spec = two_gap().spec.with_obs(top=Leaf((64, 96, 3), "uint8"))
    folder = tmp_path / "filmed"
    with EpisodeWriter(folder, spec) as writer:
        for film in pictures:
            writer.add(_episode(film))
    dataset = LeRobotDataset("me/filmed", root=folder, video_backend="pyav")
    frames = torch.stack([dataset[i]["observation.images.top"] for i in range(24)])
    wanted = torch.cat(pictures).permute(0, 3, 1, 2) / 255
    assert (frames - wanted).abs().mean() < 4 / 255


def _episode(film: torch.Tensor) -> Tensors:
    steps = len(film)
    flags = torch.zeros(steps, dtype=torch.bool)
    return {
        "obs/state": torch.zeros(steps, 2),
        "obs/top": film,
        "action": torch.zeros(steps, 2),
        "reward": torch.zeros(steps),
        "terminated": flags,
        "truncated": flags,
        "next_obs/state": torch.zeros(2),
        "next_obs/top": film[-1],
    }
