"""What a leaf is, sentences too; when two specs fit; optional abilities of environments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.core.env import HasEventCaptions, HasHeldOutTasks
from embodied.core.spec import Leaf, Spec, SpecMismatch, require_same
from embodied.core.text import decode, encode, sentences, text_leaf
from embodied.core.wrapper import Wrapper, find_protocol
from tests import toy_envs


def test_symbols_are_neither_images_nor_numbers() -> None:
    picture = Leaf((7, 7, 3), "uint8")
    cells = Leaf((7, 7, 3), "uint8", 0, (10, 5, 3) * 49, unit="symbol")
    assert (picture.is_image, picture.is_symbol) == (True, False)
    assert (cells.is_image, cells.is_symbol) == (False, True)
    assert cells.symbols == (11, 6, 4) * 49
    assert Leaf((2,), "int64", 0, 4, unit="symbol").symbols == (5, 5)
    assert not Leaf((3,), "float32", 0, 4, unit="symbol").is_symbol
    assert Leaf.from_json(cells.to_json()) == cells


def fits(one: Leaf, other: Leaf) -> None:
    """Fail unless observations of the two fit."""
    act = Leaf((), "int64", 0, 1)
    require_same(Spec({"x": one}, act, 1.0), Spec({"x": other}, act, 1.0), "here", "there")


@pytest.mark.parametrize(
    "leaf",
    [
        Leaf((2,), "int64", 0, 4),
        Leaf((2,), "int64", unit="symbol"),
        Leaf((2,), "int64", 1, 4, unit="symbol"),
        Leaf((2,), "int64", 0, (4, 4, 4), unit="symbol"),
    ],
    ids=["a number", "unbounded", "not from zero", "three bounds for two"],
)
def test_symbols_need_their_number(leaf: Leaf) -> None:
    with pytest.raises(ValueError, match='unit="symbol", low=0') as error:
        _ = leaf.symbols
    assert "\n" not in str(error.value)


def test_symbols_and_numbers_do_not_fit() -> None:
    symbol, number = Leaf((), "int64", 0, 3, unit="symbol"), Leaf((), "int64", 0, 3, unit="m")
    fits(symbol, symbol)
    fits(number, Leaf((), "int64", 0, 3))
    with pytest.raises(SpecMismatch, match="symbols"):
        fits(symbol, number)


def test_the_same_elements_in_another_order_do_not_fit() -> None:
    lift, grip = Leaf((2,), names=("lift", "grip")), Leaf((2,), names=("grip", "lift"))
    fits(lift, Leaf((2,), names=("a", "b")))
    with pytest.raises(SpecMismatch, match=r"obs/x: elements in another order, \['lift', 'grip'\]"):
        fits(lift, grip)


def test_sentences_there_and_back() -> None:
    said = ["put the cup down", "", "öffne die Schublade"]
    rows = encode(said, 24)
    assert rows.shape == (3, 24) and rows.dtype == torch.uint8
    assert decode(rows) == said
    assert decode(torch.tensor([[255, 65, 0]], dtype=torch.uint8)) == ["\ufffdA"]  # no text
    with pytest.raises(ValueError, match="6 bytes does not fit into 5"):
        encode(["abcdef"], 5)


def test_the_text_leaf_is_found_by_its_unit() -> None:
    leaves = {"state": Leaf((2,)), "task": text_leaf(4)}
    obs = {"state": torch.zeros(1, 2), "task": encode(["lift"], 4)}
    assert sentences(obs, leaves) == ["lift"]
    assert sentences(obs, {"state": leaves["state"]}) is None
    assert not leaves["task"].is_image and not leaves["task"].is_symbol
    assert Leaf.from_json(leaves["task"].to_json()).is_text


def test_a_protocol_is_found_inside_wrappers() -> None:
    env: Any = toy_envs.Reach(2)
    env.held_out, env.event_captions = torch.zeros(2, 1), lambda before, after: ["moved"] * 2
    found = find_protocol(Wrapper(Wrapper(env)), HasEventCaptions)
    assert found is not None and found.event_captions({}, {}) == ["moved", "moved"]
    held = find_protocol(Wrapper(env), HasHeldOutTasks)
    assert held is not None and held.held_out is env.held_out
    assert find_protocol(Wrapper(toy_envs.Reach(1)), HasEventCaptions) is None
