"""LeRobot reads our datasets, films included, and we read LeRobot's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.interop import need

need("lerobot", "av")

from embodied.core.spec import Leaf, Spec  # noqa: E402
from embodied.datasets.lerobot.pictures import LazyPictures  # noqa: E402
from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes  # noqa: E402
from embodied.datasets.transitions import Dataset, chunks  # noqa: E402
from tests.builders import recorded  # noqa: E402
from tests.interop.datasets import FPS, H, W, action, picture, state, write_with_lerobot  # noqa: E402

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
        obs={"state": Leaf((3,)), "top": frame, "side": frame},
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
            obs = {name: torch.from_numpy(value) for name, value in seen.items()}
            writer.add(recorded(obs, torch.from_numpy(acts)))


@pytest.mark.parametrize("images", ["mp4", "png"])
def test_lerobot_reads_what_we_wrote(images: str, tmp_path: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

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
