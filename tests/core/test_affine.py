"""The map between physical and normalised values."""

from typing import Any

import pytest
import torch

from embodied.core.affine import Affine
from embodied.core.build import ConfigError

DEGREES = Affine((-90.0, 0.0), (90.0, 100.0))


@pytest.mark.parametrize(
    ("physical", "unit"),
    [
        ([[-90.0, 0.0], [90.0, 100.0]], [[-1.0, -1.0], [1.0, 1.0]]),
        ([0.0, 75.0], [0.0, 0.5]),
        ([180.0, -50.0], [2.0, -2.0]),  # nothing is clamped
        ([90, 50], [1, 0]),  # integers become numbers
    ],
)
def test_the_edges_are_minus_one_and_one(physical: list[Any], unit: list[Any]) -> None:
    assert DEGREES.to_unit(torch.tensor(physical)).tolist() == unit
    assert DEGREES.to_physical(torch.tensor(unit)).tolist() == physical


def test_any_leading_shape_and_any_leaf_of_that_size() -> None:
    chunk = torch.randn(4, 8, 2)
    torch.testing.assert_close(DEGREES.to_physical(DEGREES.to_unit(chunk)), chunk)
    square = Affine(tuple(range(4)), tuple(range(10, 14)))
    assert square.to_unit(torch.zeros(3, 2, 2)).shape == (3, 2, 2)
    assert Affine((0.0,), (2.0,)).to_unit(torch.tensor(2.0)) == 1
    with pytest.raises(ValueError, match="do not end in 2"):
        DEGREES.to_unit(torch.zeros(3))


def test_an_axis_may_point_the_other_way() -> None:
    gripper = Affine((1.0,), (0.0,))
    assert gripper.to_unit(torch.tensor([[1.0], [0.0]])).flatten().tolist() == [-1, 1]


def test_the_inverse_undoes_it() -> None:
    x = torch.tensor([12.0, 34.0])
    torch.testing.assert_close(DEGREES.inverse().to_unit(DEGREES.to_unit(x)), x)


def test_a_constant_element_keeps_its_scale() -> None:
    measured = Affine.of_range([5.0, -1.0], [5.0, 1.0])
    assert measured == Affine((4.0, -1.0), (6.0, 1.0))


def test_json_keeps_it() -> None:
    assert Affine.from_json(DEGREES.to_json()) == DEGREES


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        ((0.0,), (0.0,), "equal in element 0"),
        ((0.0,), (1.0, 2.0), "has 1 numbers"),
        ((float("nan"),), (1.0,), "finite"),
        ((), (), "0 numbers"),
    ],
)
def test_other_numbers_are_refused(low: tuple, high: tuple, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Affine(low, high)
