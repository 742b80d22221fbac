"""Sentences as observations: UTF-8 bytes in a leaf of the unit "text".

A policy that understands language (a VLA) decodes them, one sentence per row; encoders of numbers
leave them out. `TEXT` leaves are uint8 [bytes], zero after the end of the sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from embodied.core.spec import TEXT, Leaf


def text_leaf(size: int) -> Leaf:
    return Leaf((size,), "uint8", 0, 255, TEXT)


def encode(sentences: Sequence[str], size: int) -> Tensor:
    """Sentences as uint8 [n, size]; ValueError for a sentence that is longer than `size` bytes."""
    rows = torch.zeros(len(sentences), size, dtype=torch.uint8)
    for row, sentence in zip(rows, sentences, strict=True):
        data = sentence.encode()
        if len(data) > size:
            raise ValueError(
                f"a sentence of {len(data)} bytes does not fit into {size}: {sentence!r}"
            )
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    return rows


def decode(rows: Tensor) -> list[str]:
    """The sentences of uint8 [n, size]; bytes that are not UTF-8 become U+FFFD."""
    return [bytes(row.numpy()).rstrip(b"\0").decode(errors="replace") for row in rows.cpu()]


def sentences(obs: Mapping[str, Tensor], leaves: Mapping[str, Leaf]) -> list[str] | None:
    """The sentence of every row from the first text leaf of `leaves`; None if there is none."""
    name = next((name for name, leaf in leaves.items() if leaf.is_text), None)
    return None if name is None else decode(obs[name])
