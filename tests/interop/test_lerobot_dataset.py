"""Datasets of LeRobot's own writer and reader and of ours; policies of either are the same."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

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
from embodied.core.tensors import Tensors  # noqa: E402
from embodied.datasets.collect import play  # noqa: E402
from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes  # noqa: E402

EPISODES, FPS, TASK = 30, 10, "pass the wall"
NUMBERS = {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}
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
