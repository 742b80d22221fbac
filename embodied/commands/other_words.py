"""Words of other libraries and what to write instead; imports no torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml


@cache
def answer(kind: str, word: str) -> str:
    """What to write in place of one of the "keywords" or "names"; empty for an unknown word."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())[kind]
    return next((f": write {ours}" for ours, theirs in table.items() if word in theirs), "")
