"""ImageText: pictures and sentences in one space, where what belongs together is close."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class ImageText(Protocol):
    """A dual encoder, frozen. `name` says which one, for provenance and caches."""

    name: str
    size: int
    """D, of an embedding."""
    side: int
    """Pictures are brought to side x side pixels inside."""

    def images(self, pictures: Tensor) -> Tensor:
        """uint8 [N, H, W, 3] to unit vectors [N, D] (float32)."""
        ...

    def texts(self, sentences: Sequence[str]) -> Tensor:
        """Sentences to unit vectors [len(sentences), D] (float32)."""
        ...
