"""Sentences as byte leaves."""

from __future__ import annotations

import pytest
import torch

from embodied.core.spec import Leaf
from embodied.core.text import decode, encode, sentences, text_leaf


def test_there_and_back() -> None:
    said = ["put the cup down", "", "öffne die Schublade"]
    rows = encode(said, 24)
    assert rows.shape == (3, 24) and rows.dtype == torch.uint8
    assert decode(rows) == said


def test_a_sentence_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="6 bytes does not fit into 5"):
        encode(["abcdef"], 5)


def test_bytes_that_are_no_text_do_not_stop_a_run() -> None:
    assert decode(torch.tensor([[255, 65, 0]], dtype=torch.uint8)) == ["\ufffdA"]


def test_the_text_leaf_is_found_by_its_unit() -> None:
    leaves = {"state": Leaf((2,)), "task": text_leaf(4)}
    obs = {"state": torch.zeros(1, 2), "task": encode(["lift"], 4)}
    assert sentences(obs, leaves) == ["lift"]
    assert sentences(obs, {"state": leaves["state"]}) is None
    assert not leaves["task"].is_image and not leaves["task"].is_symbol
    assert Leaf.from_json(leaves["task"].to_json()).is_text
