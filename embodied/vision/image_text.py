"""ImageText: pictures and sentences in one space, where what belongs together is close."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


def views_of(pictures: Tensor) -> int:
    """How many square views stand side by side in pictures [N, H, W, 3]; 1 where W is no multiple
    of H."""
    height, width = pictures.shape[1:3]
    return width // height if height and width % height == 0 else 1


class ImageText(Protocol):
    """A dual encoder, frozen. `name` says which one, for provenance and caches."""

    name: str
    size: int
    """D, of an embedding."""
    side: int
    """Pictures are brought to side x side pixels inside."""

    def images(self, pictures: Tensor) -> Tensor:
        """uint8 [N, H, W, 3] to unit vectors [N, D] (float32); where W is a multiple of H, views
        of one scene stand side by side."""
        ...

    def texts(self, sentences: Sequence[str]) -> Tensor:
        """Sentences to unit vectors [len(sentences), D] (float32)."""
        ...
