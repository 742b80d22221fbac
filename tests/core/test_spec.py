"""What a leaf is, and when two specs fit."""

from __future__ import annotations

import pytest

from embodied.core.spec import Leaf, Spec, SpecMismatch, require_same


def test_symbols_are_neither_images_nor_numbers() -> None:
    picture = Leaf((7, 7, 3), "uint8")
    cells = Leaf((7, 7, 3), "uint8", 0, (10, 5, 3) * 49, unit="symbol")
    assert picture.is_image and not picture.is_symbol
    assert cells.is_symbol and not cells.is_image
    assert cells.symbols == (11, 6, 4) * 49
    assert Leaf((2,), "int64", 0, 4, unit="symbol").symbols == (5, 5)
    assert not Leaf((3,), "float32", 0, 4, unit="symbol").is_symbol
    assert Leaf.from_json(cells.to_json()) == cells


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
    act = Leaf((), "int64", 0, 1)
    symbol, number = Leaf((), "int64", 0, 3, unit="symbol"), Leaf((), "int64", 0, 3, unit="m")
    one, two = Spec({"x": symbol}, act, 1.0), Spec({"x": number}, act, 1.0)
    require_same(one, one, "here", "there")
    require_same(two, Spec({"x": Leaf((), "int64", 0, 3)}, act, 1.0), "here", "there")
    with pytest.raises(SpecMismatch, match="symbols"):
        require_same(one, two, "here", "there")
