"""Datasets for the interoperability tests, written by LeRobot itself, and pictures to compare."""

from __future__ import annotations

from pathlib import Path

import numpy as np

H, W, FPS = 64, 96, 10


def picture(episode: int, step: int) -> np.ndarray:
    """[H, W, 3] uint8 that tells its episode (shade) and its step (the place of a white block)."""
    shown = np.full((H, W, 3), 40 + 30 * episode, np.uint8)
    shown[:, :, 2] = np.linspace(0, 120, W, dtype=np.uint8)
    at = 3 * step % (W - 16)
    shown[16:48, at : at + 16] = 255
    return shown


def state(episode: int, step: int) -> np.ndarray:
    return np.array([np.sin(0.3 * step + episode), 0.1 * step, 30.0 * episode], np.float32)


def action(episode: int, step: int) -> np.ndarray:
    """In degrees, as a LeRobot arm has them."""
    return np.array([90 * np.sin(0.2 * step + episode), 5.0 * step], np.float32)


def write_with_lerobot(root: Path, lengths: list[int], codec: str | None, **names: str) -> None:
    """A dataset of LeRobot's own writer: two cameras, as films by `codec`, as PNG if None."""
    from lerobot.configs.video import RGBEncoderConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    picture_of = {"dtype": "image" if codec is None else "video", "shape": (H, W, 3)}
    picture_of["names"] = ["height", "width", "channels"]
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["a", "b", "c"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["x.pos", "y.pos"]},
        "observation.images.top": picture_of,
        "observation.images.side": picture_of,
    }
    settings = {} if codec is None else {"rgb_encoder": RGBEncoderConfig(vcodec=codec)}
    dataset = LeRobotDataset.create(
        "me/test", FPS, features, root, "arm", use_videos=codec is not None, **settings
    )
    for episode, length in enumerate(lengths):
        for step in range(length):
            frame = {"observation.state": state(episode, step), "action": action(episode, step)}
            frame["observation.images.top"] = picture(episode, step)
            frame["observation.images.side"] = picture(episode, step + 7)
            dataset.add_frame({**frame, "task": names.get("task", "push the block")})
        dataset.save_episode()
    dataset.finalize()
