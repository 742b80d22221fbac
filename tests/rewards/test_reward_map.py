"""Reward maps: values by hand, and the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.rewards.analysis.reward_map import draw, reward_map

SPEC = Spec({"state": Leaf((3,), names=("a", "b", "c"))}, Leaf((1,), low=-1.0, high=1.0), 0.1)
OBS = {"state": torch.tensor([[9.0, 9.0, 0.25]])}
X, Y = ("a", -1.0, 1.0), ("b", 0.0, 1.0)


def test_rows_are_y_and_columns_x() -> None:
    one = reward_map({"of": "value", "a": "a", "weight": 2.0}, SPEC, OBS, X, Y, points=3)
    assert one.tolist() == [[-2, 0, 2]] * 3
    other = reward_map({"of": "value", "a": "b"}, SPEC, OBS, X, Y, points=3)
    assert other.T.tolist() == [[0, 0.5, 1]] * 3
    kept = reward_map({"of": "value", "a": "c"}, SPEC, OBS, X, Y, points=2)
    assert (kept == 0.25).all() and OBS["state"].tolist() == [[9, 9, 0.25]]


def test_a_utility_is_the_signed_geometric_mean(tmp_path: Path) -> None:
    """At a = -1, b = 1: -(1 1)^(1/2); at a = 1, b = 1/2: (1/2)^(1/2); where b = 0: 0."""
    node = {"weight": 1.0, "all": [{"of": "value", "a": "a"}, {"of": "value", "a": "b"}]}
    values = reward_map(node, SPEC, OBS, X, Y, points=3)
    half = 0.5**0.5
    expected = torch.tensor([[0.0, 0, 0], [-half, 0, half], [-1, 0, 1]])
    torch.testing.assert_close(values, expected)
    draw(values, X, Y, "offence", tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_bad_ranges() -> None:
    node = {"of": "value", "a": "a"}
    with pytest.raises(ConfigError, match="is empty"):
        reward_map(node, SPEC, OBS, ("a", 1.0, 1.0), Y)
    with pytest.raises(ConfigError, match="not one element"):
        reward_map(node, SPEC, OBS, ("state", 0.0, 1.0), Y)
    with pytest.raises(ConfigError, match="no observation or element"):
        reward_map(node, SPEC, OBS, ("d", 0.0, 1.0), Y)
