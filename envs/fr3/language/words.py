"""Sentences as word numbers: one vocabulary for the ten instructions, 0 is "no word"."""

from __future__ import annotations

import numpy as np

from embodied.core.spec import SYMBOL, Leaf
from embodied.envs.fr3.language.instructions import INSTRUCTIONS

SENTENCES = tuple(each.text for each in INSTRUCTIONS)
WORDS = tuple(sorted({word for text in SENTENCES for word in text.split()}))
LENGTH = max(len(text.split()) for text in SENTENCES)
LEAF = Leaf((LENGTH,), "uint8", 0, len(WORDS), SYMBOL)


def tokens(text: str) -> list[int]:
    """The words of `text` as LENGTH numbers, 0 after its end; ValueError for unknown words."""
    words = text.split()
    unknown = [word for word in words if word not in WORDS]
    if unknown or len(words) > LENGTH:
        raise ValueError(f"not a sentence of these tasks: {text!r}")
    return [*(WORDS.index(word) + 1 for word in words), *[0] * (LENGTH - len(words))]


TOKENS = np.array([tokens(text) for text in SENTENCES], np.uint8)
"""The tokens of every instruction, [10, LENGTH]."""
