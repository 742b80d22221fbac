"""ImageText: the interface of dual encoders of images and text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import functional


def views_of(pictures: Tensor) -> int:
    """Number of square views side by side in images [N, H, W, 3]; 1 if W is not a multiple of H."""
    height, width = pictures.shape[1:3]
    return width // height if height and width % height == 0 else 1


def resized(chw: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """Images uint8 [N, 3, H, W] resized to `size`: exactly as by PIL on a CPU (with rounding
    between the two directions), within one or two grey levels elsewhere."""
    smooth = mode != "nearest-exact"
    if chw.device.type == "cpu":
        return functional.interpolate(chw, size, mode=mode, antialias=smooth)
    fine = functional.interpolate(chw.float(), size, mode=mode, antialias=smooth)
    return fine.clamp(0, 255).round()


class ImageText(Protocol):
    """A frozen dual encoder. `name` identifies it, for provenance and caches."""

    name: str
    size: int
    """Dimension D of an embedding."""
    side: int
    """Images are resized to side x side pixels."""

    def images(self, pictures: Tensor) -> Tensor:
        """uint8 [N, H, W, 3] to unit vectors [N, D] (float32); if W is a multiple of H, it contains
        several views of one scene."""
        ...

    def texts(self, sentences: Sequence[str]) -> Tensor:
        """Sentences to unit vectors [len(sentences), D] (float32)."""
        ...
