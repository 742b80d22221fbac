"""Image, depth and point-cloud observations as uint8 images and coloured points."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.spec import Leaf

Picture = NDArray[np.uint8]
SMALL = 160
"""Images below this height (pixels) are enlarged by a whole factor."""
PLAIN = (90, 90, 100)


def is_picture(leaf: Leaf) -> bool:
    """Whether a leaf is an image or a depth map."""
    flat = len(leaf.shape) == 3 and leaf.shape[2] == 1 and min(leaf.shape[:2]) >= 16
    return leaf.is_image or (flat and not leaf.is_symbol)


def is_cloud(name: str, leaf: Leaf) -> bool:
    """Whether a leaf is a point cloud [N, 3 or more]."""
    marked = getattr(leaf, "is_points", False) or name.rpartition("/")[2] == "points"
    return marked and len(leaf.shape) == 2 and leaf.shape[1] >= 3


def picture_of(value: Tensor, leaf: Leaf) -> Picture:
    """One value [H, W, C] of a leaf as uint8 [H, W, 3], enlarged if it is small.

    Of stacked frames the last is shown; one channel is grey, depth from near (dark) to far.
    """
    shown = value.cpu()
    if not leaf.is_image:
        finite = torch.nan_to_num(shown.float(), posinf=0.0, neginf=0.0)
        low, high = finite.min(), finite.max()
        shown = ((finite - low) / (high - low).clamp(min=1e-9) * 255).to(torch.uint8)
    channels = shown.shape[2]
    shown = shown[..., -3:] if channels >= 3 and channels % 3 == 0 else shown[..., :1]
    times = -(-SMALL // shown.shape[0])
    shown = shown.repeat_interleave(times, 0).repeat_interleave(times, 1)
    return shown.expand(-1, -1, 3).contiguous().numpy()


def cloud_of(value: Tensor) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Positions [N, 3] (m) and colours [N, 3] of a point cloud [N, 3 or more]; columns 3 to 5 are
    RGB in [0, 1]."""
    rows = value.cpu().float()
    places = rows[:, :3].numpy()
    if rows.shape[1] < 6:
        return places, np.broadcast_to(np.array(PLAIN, np.uint8), places.shape)
    colours = (rows[:, 3:6].clamp(0, 1) * 255).round().to(torch.uint8)
    return places, colours.numpy()
