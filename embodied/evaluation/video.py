"""Videos of episodes (H.264), and image strips of a few of their frames."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from embodied.core.atomic_write import write_durably
from embodied.datasets.lerobot.video import decode_film, encode_film, encode_png


def write_mp4(path: Path, frames: Tensor, fps: float) -> Path:
    """Write `frames` [T, H, W, 3] (uint8) as an MP4 that browsers play; odd sizes lose one line."""
    height, width = (side - side % 2 for side in frames.shape[1:3])
    film = encode_film(frames[:, :height, :width], fps)
    write_durably(path, lambda sink: sink.write(film))
    return path


def read_mp4(path: Path) -> Tensor:
    """All frames of a video, [T, H, W, 3] uint8."""
    return torch.stack(list(decode_film(path)))


def strip(frames: Tensor, count: int = 6) -> Tensor:
    """`count` frames evenly spaced from first to last, side by side: [H, count * W, 3] uint8."""
    picks = torch.linspace(0, len(frames) - 1, min(count, len(frames))).round().long()
    return torch.cat(list(frames[picks]), dim=1)


def strip_png(path: Path, count: int = 6) -> bytes:
    """The strip of a video as PNG."""
    return encode_png(strip(read_mp4(path), count))
