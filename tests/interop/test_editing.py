"""merge, drop, split and check on datasets that LeRobot itself wrote; LeRobot reads the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.interop import need

need("lerobot", "av")

from embodied.core.spec import DEPTH, Leaf, Spec  # noqa: E402
from embodied.datasets.editing.edit import Split, drop, merge, numbered, split  # noqa: E402
from embodied.datasets.editing.rotations import to_matrix  # noqa: E402
from embodied.datasets.editing.transform import Rotation, rotate  # noqa: E402
from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes  # noqa: E402
from embodied.datasets.lerobot.schema import read_info  # noqa: E402
from embodied.importers import convert  # noqa: E402
from tests.builders import recorded  # noqa: E402
from tests.foreign import as_version_2  # noqa: E402
from tests.interop.datasets import write_with_lerobot  # noqa: E402

LENGTHS = [12, 25, 8, 15]
NEW = ("index", "episode_index", "task_index")  # numbers that a copy gives anew


@pytest.fixture(scope="module", params=["libsvtav1", "h264", None])
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs") / "demos"
    write_with_lerobot(folder, LENGTHS, request.param)
    return folder


def items(folder: Path, episode: int) -> list[dict[str, Any]]:
    """The steps of an episode as LeRobot reads them."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("me/test", root=folder)
    line = dataset.meta.episodes[episode]
    return [dataset[i] for i in range(line["dataset_from_index"], line["dataset_to_index"])]


def require_same_items(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other)
    for here, there in zip(one, other, strict=True):
        assert here.keys() == there.keys() and here["task"] == there["task"]
        for key, value in here.items():
            if isinstance(value, torch.Tensor) and key not in NEW:
                assert torch.equal(value, there[key]), key


def test_lerobot_reads_what_is_left_after_a_drop(theirs: Path, tmp_path: Path) -> None:
    made = drop(theirs, tmp_path / "kept", numbered("0,2"))
    assert made.uncut == [] and made.episodes == 2
    require_same_items(items(tmp_path / "kept", 0), items(theirs, 1))
    require_same_items(items(tmp_path / "kept", 1), items(theirs, 3))
    whole, kept = read_episodes(theirs), read_episodes(tmp_path / "kept")
    assert torch.equal(kept.episode(1)["obs/top"], whole.episode(3)["obs/top"])


def test_lerobot_reads_what_was_merged_and_split(theirs: Path, tmp_path: Path) -> None:
    codec = "h264" if (theirs / "videos").exists() else None
    write_with_lerobot(tmp_path / "more", [9, 10], codec, task="pull")
    merge([theirs, tmp_path / "more"], tmp_path / "all")
    require_same_items(items(tmp_path / "all", 2), items(theirs, 2))
    require_same_items(items(tmp_path / "all", 5), items(tmp_path / "more", 1))
    split(tmp_path / "all", tmp_path / "a", tmp_path / "b", Split(episodes=4, seed=None))
    require_same_items(items(tmp_path / "b", 0), items(tmp_path / "more", 0))
    require_same_items(items(tmp_path / "a", 3), items(theirs, 3))


@pytest.mark.parametrize("images", ["mp4", "png"])
def test_what_policies_do_not_see_stays_hidden_in_lerobot(images: Any, tmp_path: Path) -> None:
    """Its training does not take it as an input, and its editing, which drops our key, keeps it."""
    from lerobot.datasets import dataset_tools as tools
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.factory import make_policy

    numbers = torch.rand(6, 2)
    shown = torch.full((6, 64, 96, 3), 90, dtype=torch.uint8)
    shown[:, 16:48, 24:72] = 20 * torch.arange(6, dtype=torch.uint8).view(-1, 1, 1, 1)
    deep = (torch.arange(6.0).view(-1, 1, 1, 1) / 10 + 0.3).expand(-1, 8, 8, 1).contiguous()
    obs = {"state": numbers, "front": shown, "critic/depth": deep}
    obs |= {"privileged/state": numbers + 1, "privileged/picture": 255 - shown}
    leaves = {name: Leaf(tuple(v.shape[1:]), str(v.dtype)[6:]) for name, v in obs.items()}
    leaves["critic/depth"] = Leaf((8, 8, 1), low=0.0, unit=DEPTH)
    spec = Spec(leaves, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
    with EpisodeWriter(tmp_path / "ours", spec, images=images) as writer:
        for _ in range(3):
            writer.add(recorded(obs, numbers[:5] / 2), "push")
    theirs = LeRobotDataset("me/ours", root=tmp_path / "ours", delta_timestamps={"action": [0.0]})
    assert theirs.meta.camera_keys == ["observation.images.front"] and not theirs.meta.depth_keys
    small = {"dim_model": 16, "dim_feedforward": 16, "n_heads": 2, "n_decoder_layers": 1}
    config = ACTConfig(chunk_size=1, n_action_steps=1, device="cpu", push_to_hub=False, **small)
    config.pretrained_backbone_weights = None
    policy = make_policy(config, ds_meta=theirs.meta)
    assert set(policy.config.input_features) == {"observation.state", "observation.images.front"}
    policy.forward(next(iter(torch.utils.data.DataLoader(theirs, batch_size=4))))
    tools.delete_episodes(theirs, [1], tmp_path / "kept", "me/kept")
    tools.split_dataset(theirs, {"first": [0, 2], "rest": [1]}, tmp_path / "split")
    kept = LeRobotDataset("me/kept", root=tmp_path / "kept")
    tools.recompute_stats(kept)
    other = LeRobotDataset("me/first", root=tmp_path / "split" / "first")
    tools.merge_datasets([kept, other], "me/merged", tmp_path / "merged")
    found = [tmp_path / "kept", tmp_path / "split" / "first", tmp_path / "merged"]
    if images == "png":
        tools.convert_image_to_video_dataset(kept, tmp_path / "film", "me/film")
        found.append(tmp_path / "film")
    for folder in found:
        edited = read_episodes(folder)
        assert "embodied" not in read_info(folder) and set(edited.texts) == {"push"}
        assert set(edited.spec.obs) == set(obs) and edited.spec.obs["critic/depth"].is_depth
        for name in ("privileged/state", "privileged/picture", "critic/depth"):
            torch.testing.assert_close(edited.steps[f"obs/{name}"][5:10], obs[name][:5])


def test_a_rotated_and_relative_dataset_is_lerobots(theirs: Path, tmp_path: Path) -> None:
    """LeRobot reads the new column with its size and statistics, and the rest as it was."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    rotate(theirs, tmp_path / "six", Rotation("observation.state", "euler", "6d"))
    was, now = items(theirs, 2), items(tmp_path / "six", 2)
    for here, there in zip(now, was, strict=True):
        assert torch.equal(here["observation.images.top"], there["observation.images.top"])
        ours, theirs_ = (
            to_matrix(item["observation.state"][None].numpy(), kind)
            for item, kind in ((here, "6d"), (there, "euler"))
        )
        np.testing.assert_allclose(ours, theirs_, atol=1e-5)
    meta = LeRobotDataset("me/test", root=tmp_path / "six").meta
    assert meta.features["observation.state"]["shape"] == (6,)
    assert len(meta.stats["observation.state"]["mean"]) == 6


@pytest.mark.parametrize("version", ["v2.0", "v2.1"])
def test_lerobot_reads_a_dataset_of_version_2(theirs: Path, tmp_path: Path, version: str) -> None:
    from lerobot.scripts.convert_dataset_v21_to_v30 import convert_dataset

    old = as_version_2(theirs, tmp_path / "old", version)
    convert("lerobot", old, tmp_path / "new")
    for episode in range(len(LENGTHS)):
        require_same_items(items(tmp_path / "new", episode), items(theirs, episode))
    if version == "v2.1":  # LeRobot's own converter makes the same
        convert_dataset("me/test", root=old, push_to_hub=False)
        for episode in range(len(LENGTHS)):
            require_same_items(items(tmp_path / "new", episode), items(old, episode))
