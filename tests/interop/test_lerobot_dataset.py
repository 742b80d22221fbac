"""Datasets of LeRobot's own writer and of ours, films included, are read by the other's reader;
policies of either are the same."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.interop import need

need("lerobot", "av")

from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402

from embodied.commands.eval import evaluate_run  # noqa: E402
from embodied.commands.train import train  # noqa: E402
from embodied.core import checkpoint  # noqa: E402
from embodied.core.build import build  # noqa: E402
from embodied.core.env import VecEnv  # noqa: E402
from embodied.core.policy import Policy  # noqa: E402
from embodied.core.spec import Leaf, Spec  # noqa: E402
from embodied.core.tensors import Tensors  # noqa: E402
from embodied.datasets.collect import play  # noqa: E402
from embodied.datasets.lerobot.pictures import LazyPictures  # noqa: E402
from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes  # noqa: E402
from embodied.datasets.transitions import Dataset, chunks  # noqa: E402
from tests.adopt.checkpoints import embodied  # noqa: E402
from tests.builders import node_of, recorded  # noqa: E402
from tests.interop.datasets import FPS, H, W, action, picture, state, write_with_lerobot  # noqa: E402

EPISODES, TASK = 30, "pass the wall"
NUMBERS = {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}
FEATURES = {"observation.state": NUMBERS, "action": NUMBERS}
MAPPING = "obs: {state: observation.state}\naction: {low: [-1, -1], high: [1, 1]}\n"
STEPS = ("steps=120", "learner.batch_size=64", "policy.width=64", "eval.episodes=20", "video=false")


def two_gap() -> VecEnv:
    return build(node_of("envs.toy.two_gap.TwoGap", num_envs=8), VecEnv)


@pytest.fixture(scope="module")
def episodes() -> list[Tensors]:
    env = two_gap()
    demonstrator = node_of("policies.scripted.simple.TwoGapDemonstrator")
    played = play(build(demonstrator, Policy, spec=env.spec), env, 0)
    return [episode for episode, _ in islice(played, EPISODES)]


@pytest.fixture(scope="module")
def theirs(episodes: list[Tensors], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstrations as LeRobot's writer records them."""
    folder = tmp_path_factory.mktemp("theirs") / "two_gap"
    dataset = LeRobotDataset.create("me/two_gap", FPS, FEATURES, root=folder, use_videos=False)
    for episode in episodes:
        for seen, done in zip(episode["obs/state"], episode["action"], strict=True):
            frame = {"observation.state": seen.numpy(), "action": done.numpy(), "task": TASK}
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


LENGTHS = [12, 25, 8]


@pytest.mark.parametrize("codec", ["libsvtav1", "h264", None])
def test_we_read_what_lerobot_wrote(codec: str | None, tmp_path: Path) -> None:
    write_with_lerobot(tmp_path / "theirs", LENGTHS, codec)
    whole = read_episodes(tmp_path / "theirs")
    lazy = read_episodes(tmp_path / "theirs", memory_mb=0.5)
    assert whole.length.tolist() == LENGTHS and whole.texts == ("push the block",) * 3
    assert isinstance(lazy.steps["obs/top"], LazyPictures)
    tolerance = 0 if codec is None else 30  # of 255, at LeRobot's own quality
    row = 0
    for episode, length in enumerate(LENGTHS):
        for step in range(length):
            assert torch.equal(whole.steps["action"][row], torch.from_numpy(action(episode, step)))
            shown = whole.steps["obs/side"][row].int() - torch.from_numpy(
                picture(episode, step + 7)
            )
            assert shown.abs().float().mean() <= tolerance / 10
            assert shown.abs()[:, : W - 17].max() <= 4 * tolerance
            assert torch.equal(lazy.steps["obs/side"][row], whole.steps["obs/side"][row])
            row += 1
    torch.manual_seed(0)
    one = Dataset(chunks(whole, 4)).sample(8)
    torch.manual_seed(0)
    other = Dataset(chunks(lazy, 4)).sample(8)
    assert all(torch.equal(value, other[key]) for key, value in one.items())


def our_dataset(folder: Path, images: Any) -> None:
    frame = Leaf((H, W, 3), "uint8", 0, 255)
    spec = Spec(
        obs={"state": Leaf((3,)), "top": frame, "side": frame, "privileged/mass": Leaf((1,))},
        act=Leaf((2,), low=-1.0, high=1.0),
        dt=1 / FPS,
        text="push the block",
    )
    with EpisodeWriter(folder, spec, "sim", images) as writer:
        for number, length in enumerate(LENGTHS):
            tops = np.stack([picture(number, t) for t in range(length + 1)])
            sides = np.stack([picture(number, t + 7) for t in range(length + 1)])
            states = np.stack([state(number, t) for t in range(length + 1)])
            acts = np.stack([action(number, t) / 200 for t in range(length)])
            seen = {"top": tops, "side": sides, "state": states}
            seen["privileged/mass"] = np.ones((length + 1, 1), np.float32)
            obs = {name: torch.from_numpy(value) for name, value in seen.items()}
            writer.add(recorded(obs, torch.from_numpy(acts)))


@pytest.mark.parametrize("images", ["mp4", "png"])
def test_lerobot_reads_what_we_wrote(images: str, tmp_path: Path) -> None:
    our_dataset(tmp_path / "ours", images)
    ours = read_episodes(tmp_path / "ours")
    later = {"action": [0.0, 1 / FPS, 2 / FPS]}
    theirs = LeRobotDataset("me/ours", root=tmp_path / "ours", delta_timestamps=later)
    assert len(theirs) == sum(LENGTHS) and theirs.num_episodes == len(LENGTHS)
    for row in range(len(theirs)):
        item = theirs[row]
        assert item["task"] == "push the block"
        assert torch.allclose(item["observation.state"], ours.steps["obs/state"][row])
        assert torch.allclose(item["action"][0], ours.steps["action"][row])
        for name in ("top", "side"):
            shown = (item[f"observation.images.{name}"] * 255).round().permute(1, 2, 0)
            assert (shown - ours.steps[f"obs/{name}"][row].float()).abs().max() <= 1
    last = theirs[sum(LENGTHS) - 1]
    assert last["action_is_pad"].tolist() == [False, True, True]


def test_lerobot_trains_on_what_we_wrote_and_its_policy_comes_back(tmp_path: Path) -> None:
    """ACT of two cameras; what policies do not see is none of its inputs."""
    our_dataset(tmp_path / "ours", "mp4")
    words = [f"--dataset.root={tmp_path / 'ours'}", "--dataset.repo_id=me/ours", "--steps=2"]
    words += ["--policy.type=act", "--policy.device=cpu", "--policy.push_to_hub=false"]
    words += ["--policy.pretrained_backbone_weights=null", "--policy.chunk_size=4"]
    words += ["--policy.n_action_steps=4", "--batch_size=2", "--num_workers=0", "--save_freq=2"]
    words += ["--policy.dim_model=32", "--policy.dim_feedforward=32", "--policy.n_heads=2"]
    command = [sys.executable, "-m", "lerobot.scripts.lerobot_train", *words]
    done = subprocess.run(
        [*command, f"--output_dir={tmp_path / 'out'}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (weights,) = (tmp_path / "out").glob("checkpoints/000002/pretrained_model")
    embodied("adopt", str(weights), f"fps={FPS}", f"out={tmp_path / 'run'}")
    spec = checkpoint.load_policy(tmp_path / "run").spec
    assert set(spec.obs) == {"state", "top", "side"} and spec.act.size == 2
