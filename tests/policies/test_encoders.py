"""What encoders see, in which order, and how it is normalised."""

from __future__ import annotations

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf
from embodied.core.text import encode, text_leaf
from embodied.nn.normalizers import MeanStdNormalizer, MinMaxNormalizer
from embodied.policies.networks.encoders import Encoder, ImageConfig

OBS = {
    "b": Leaf((2,)),
    "a": Leaf((2, 2)),
    "count": Leaf((), "int64"),
    "critic/force": Leaf((3,)),
    "privileged/mass": Leaf((1,)),
}
ROWS = {
    "b": torch.tensor([[7.0, 8.0]]),
    "a": torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]),
    "count": torch.tensor([5]),
    "critic/force": torch.tensor([[9.0, 9.0, 9.0]]),
    "privileged/mass": torch.tensor([[6.0]]),
}


def test_vectors_are_sorted_by_name_and_critics_see_more() -> None:
    encoder = Encoder(OBS)
    assert encoder.size == 7
    assert encoder(ROWS).tolist() == [[1, 2, 3, 4, 7, 8, 5]]
    assert Encoder(OBS, asymmetric=True)(ROWS).tolist() == [[1, 2, 3, 4, 7, 8, 5, 9, 9, 9, 6]]


def test_sentences_are_left_to_policies_that_read() -> None:
    leaves = {"b": Leaf((2,)), "text": text_leaf(8)}
    for asymmetric in (False, True):
        encoder = Encoder(leaves, asymmetric=asymmetric)
        assert encoder.size == 2
        rows = {"b": ROWS["b"], "text": encode(["lift"], 8)}
        assert encoder(rows).tolist() == [[7, 8]]


def test_standard_by_hand() -> None:
    norm = MeanStdNormalizer(3, clip=2.0)
    values = torch.tensor([[0.0, 5.0, 1.0], [4.0, 5.0, 3.0]])
    assert torch.equal(norm(values), values)  # the identity until fitted, beyond `clip` too
    norm.fit(values)
    # Means 2, 5, 2; deviations 2, 0 (which keeps scale 1), 1.
    assert norm(values).tolist() == [[-1, 0, -1], [1, 0, 1]]
    assert norm(torch.tensor([[100.0, 5.5, 2.0]])).tolist() == [[2.0, 0.5, 0.0]]
    norm.fit(torch.ones(1, 3))
    assert torch.isfinite(norm(values)).all()


def test_range_there_and_back() -> None:
    scale = MinMaxNormalizer(2)
    values = torch.tensor([[-0.2, 0.5], [0.6, 0.5]])
    assert torch.equal(scale.inverse(scale(values)), values)
    scale.fit(values)
    torch.testing.assert_close(scale(values), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    some = torch.randn(100, 2)
    torch.testing.assert_close(scale.inverse(scale(some)), some)
    assert scale.radius[1] == pytest.approx(0.01)


def test_fitted_encoders_see_unit_variance() -> None:
    encoder = Encoder({"x": Leaf((2,)), "y": Leaf((1,))})
    rows = {"obs/x": 3 + 5 * torch.randn(1000, 2), "obs/y": torch.randn(1000, 1) / 50}
    encoder.fit(rows)
    features = encoder({"x": rows["obs/x"], "y": rows["obs/y"]})
    torch.testing.assert_close(features.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(features.std(0, correction=0), torch.ones(3), atol=1e-4, rtol=0)


def test_cameras_of_any_size_each_with_its_own_network() -> None:
    obs = {"front": Leaf((33, 47, 3), "uint8"), "depth": Leaf((20, 20, 1), "uint8")}
    encoder = Encoder({**obs, "state": Leaf((4,))})
    rows = {
        name: torch.randint(256, (2, *leaf.shape)).to(torch.uint8) for name, leaf in obs.items()
    }
    features = encoder({**rows, "state": torch.randn(2, 4)})
    assert features.shape == (2, encoder.size) == (2, 4 + 64 + 64)
    assert torch.equal(Encoder(obs).norm(torch.zeros(2, 0)), torch.zeros(2, 0))
    assert Encoder(obs)(rows).shape == (2, 128)


def test_shared_cameras_are_one_network() -> None:
    obs = {name: Leaf((16, 16, 3), "uint8") for name in ("left", "right")}
    shared, own = Encoder(obs, ImageConfig(shared=True)), Encoder(obs)
    count = [sum(p.numel() for p in encoder.parameters()) for encoder in (shared, own)]
    assert 2 * count[0] == count[1]
    picture = torch.randint(256, (1, 16, 16, 3)).to(torch.uint8)
    left, right = shared({"left": picture, "right": picture}).chunk(2, 1)
    assert torch.equal(left, right)
    other = Encoder(obs, ImageConfig(shared=True))
    other.load_state_dict(shared.state_dict())
    assert torch.equal(other({"left": picture, "right": picture})[:, 64:], right)
    with pytest.raises(ConfigError, match="one shape"):
        Encoder({**obs, "left": Leaf((8, 8, 3), "uint8")}, ImageConfig(shared=True))


def test_symbols_are_one_hot_last_and_never_normalised() -> None:
    cells = Leaf((1, 2, 2), "uint8", 0, (2, 1, 2, 1), unit="symbol")
    turn = Leaf((), "int64", 0, 3, unit="symbol")
    assert cells.symbols == (3, 2, 3, 2) and turn.symbols == (4,)
    encoder = Encoder({"turn": turn, "cells": cells, "z": Leaf((1,))})
    rows = {
        "cells": torch.tensor([[[[2, 0], [1, 1]]], [[[0, 1], [0, 0]]]], dtype=torch.uint8),
        "turn": torch.tensor([3, 0]),
        "z": torch.tensor([[5.0], [7.0]]),
    }
    encoder.fit({f"obs/{name}": value for name, value in rows.items()})
    seen = encoder(rows)
    assert encoder.size == 15 and seen.dtype == torch.float32
    # z standardised; then the cells' four elements (3, 2, 3, 2 columns), then the turn's four.
    assert seen[0].tolist() == [-1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1]
    assert seen[1].tolist() == [1, 1, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 0]
    assert torch.equal(Encoder({"turn": turn})(rows), torch.eye(4)[[3, 0]])


def test_nothing_to_see_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to see"):
        Encoder({"critic/force": Leaf((3,))})
