"""What encoders see, in which order, and how it is normalised; cameras and point clouds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError, build, parse
from embodied.core.policy import Policy
from embodied.core.spec import DEPTH, Leaf, Spec
from embodied.core.text import encode, text_leaf
from embodied.export.decision import Decision, facts, write_onnx, write_torchscript
from embodied.nn.normalizers import MeanStdNormalizer, MinMaxNormalizer
from embodied.policies.networks.encoders import (
    Camera,
    Encoder,
    ImageConfig,
    PointConfig,
    PointNet,
    Residual,
    SpatialEmbeddings,
    SpatialSoftmax,
)
from tests.builders import node_of

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


BODIES, HEADS = ("strided", "resnet"), ("flat", "softmax", "embeddings")
CONFIG = ImageConfig(channels=(8, 16), features=12)


def make(body: str, head: str, shape: tuple[int, ...] = (21, 30, 3), **settings: Any) -> Camera:
    torch.manual_seed(0)
    node = {"channels": [8, 16], "features": 12, "body": body, "head": head, **settings}
    return Camera(Leaf(shape, "uint8"), parse(ImageConfig, node, "images"))


def pictures(n: int, shape: tuple[int, ...] = (21, 30, 3)) -> Tensor:
    return torch.randint(256, (n, *shape)).to(torch.uint8)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("body", BODIES)
def test_every_body_with_every_head(body: str, head: str) -> None:
    camera = make(body, head)
    seen = pictures(5)
    features = camera(seen)
    assert features.shape == (5, 12) and features.isfinite().all()
    # Rows do not see each other: no statistics over the batch, in training either.
    torch.testing.assert_close(camera.train()(seen[:1]), features[:1], atol=1e-5, rtol=0)
    features[:, 0].sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in camera.parameters() if p.ndim)


@pytest.mark.parametrize("body", BODIES)
def test_every_layer_halves_and_rounds_up(body: str) -> None:
    assert make(body, "flat").convolve(torch.zeros(1, 3, 21, 30)).shape == (1, 16, 6, 8)


def test_a_tiny_picture_passes() -> None:
    camera = make("resnet", "softmax", (3, 5, 1), channels=[8, 8, 8, 8])
    assert camera(pictures(2, (3, 5, 1))).isfinite().all()


def test_softmax_says_where_by_hand() -> None:
    """One bright pixel in row 0 of 3, column 3 of 5: x = 0.5, y = -1; nothing anywhere: 0, 0."""
    head = SpatialSoftmax(2, 3, 5, CONFIG)
    h = torch.zeros(1, 2, 3, 5)
    h[0, 0, 0, 3] = 100.0
    torch.testing.assert_close(head(h), torch.tensor([[0.5, -1.0, 0.0, 0.0]]), atol=1e-6, rtol=0)


def test_embeddings_are_sums_under_maps() -> None:
    torch.manual_seed(0)
    head = SpatialEmbeddings(2, 3, 4, CONFIG)
    h = torch.randn(5, 2, 3, 4)
    maps = head.maps.view(2, 3, 4, CONFIG.embeddings)
    expected = torch.einsum("nchw,chwe->nce", h, maps).flatten(1)
    torch.testing.assert_close(head(h), expected)


def test_a_residual_block_adds_its_short_cut() -> None:
    torch.manual_seed(0)
    block, h = Residual(4, 8), torch.randn(2, 4, 7, 6)
    last = block.body[-1]
    assert isinstance(last, nn.GroupNorm)
    nn.init.zeros_(last.weight)
    torch.testing.assert_close(block(h), block.short(h).relu())
    assert block(h).shape == (2, 8, 4, 3)


def test_the_default_camera_is_what_it_was() -> None:
    """Names and values of the same seed: convolutions 0, 2, .. then a linear layer and its norm."""
    camera = make("strided", "flat")
    torch.manual_seed(0)
    one, two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3)
    linear = nn.Linear(16 * 6 * 8, 12)
    state = camera.state_dict()
    expected = {"convolve.0": one, "convolve.2": two, "project.1": linear}
    for name, layer in expected.items():
        assert torch.equal(state[f"{name}.weight"], layer.weight)
        assert torch.equal(state[f"{name}.bias"], layer.bias)
    assert {name.rpartition(".")[0] for name in state} == {*expected, "project.2"}


@pytest.mark.parametrize(
    ("body", "head", "shared"), [("resnet", "softmax", True), ("resnet", "embeddings", False)]
)
def test_camera_policies_export(body: str, head: str, shared: bool, tmp_path: Path) -> None:
    """Both files are compared with PyTorch as they are written, and not written beyond 1e-5."""
    torch.manual_seed(0)
    images = {"body": body, "head": head, "shared": shared, "channels": [8, 16]}
    node = node_of("policies.generative.flow.Flow", chunk=2, width=16, images=images)
    eyes = {name: Leaf((20, 16, 3), "uint8") for name in ("base", "wrist")}
    obs = {**eyes, "state": Leaf((3,))}
    policy = build(node, Policy, spec=Spec(obs, Leaf((2,), low=-1.0, high=1.0), dt=0.05))
    decision = Decision(policy)
    written = write_onnx(decision, facts(decision), tmp_path / "policy.onnx")
    assert written.difference is not None and written.difference <= 1e-5
    write_torchscript(decision, facts(decision), tmp_path / "policy.pt")


def test_distances_are_a_picture_and_near_ones_count_most() -> None:
    torch.manual_seed(0)
    depth = Leaf((20, 16, 1), low=0.0, unit=DEPTH)
    encoder = Encoder({"depth": depth, "state": Leaf((3,))}, CONFIG)
    assert (encoder.images, encoder.vectors, encoder.norm.mean.shape) == (
        ["depth"],
        ["state"],
        (3,),
    )
    obs = {"depth": torch.full((1, 20, 16, 1), 0.3), "state": torch.zeros(1, 3)}
    before = encoder(obs)
    changes = []
    for far in (0.3, 3.0):
        obs["depth"] = torch.full((1, 20, 16, 1), far)
        base = encoder(obs)
        obs["depth"] = obs["depth"] + 0.05
        changes.append((encoder(obs) - base).abs().max())
    assert changes[0] > 3 * changes[1] > 0 and before.isfinite().all()
    assert encoder({**obs, "depth": torch.full((1, 20, 16, 1), -1.0)}).isfinite().all()
    with pytest.raises(ConfigError, match="one shape and kind"):
        eyes = {"depth": depth, "grey": Leaf((20, 16, 1), "uint8")}
        Encoder(eyes, ImageConfig(channels=(8,), shared=True))


POINTS_OBS = {"points": Leaf((20, 6), unit="points"), "state": Leaf((3,))}
ACT = Leaf((2,), low=-1.0, high=1.0)


def rows(n: int = 4) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    cloud = torch.rand(n, 20, 6, generator=random) * torch.tensor([1.0, 2, 3, 1, 1, 1])
    return {"points": cloud, "state": torch.rand(n, 3, generator=random)}


def test_order_and_repeats_do_not_matter() -> None:
    torch.manual_seed(0)
    net, points = PointNet(6, PointConfig()), rows()["points"]
    net.fit(points)
    out = net(points)
    assert out.shape == (4, 64)
    torch.testing.assert_close(net(points[:, torch.randperm(20)]), out)
    torch.testing.assert_close(net(torch.cat([points, points[:, :7]], 1)), out)
    assert not torch.allclose(net(points + 0.1), out, atol=1e-3)


def test_one_normaliser_for_all_points() -> None:
    net, points = PointNet(6, PointConfig()), rows(500)["points"]
    net.fit(points)
    torch.testing.assert_close(net.norm.mean, points.mean((0, 1)))
    assert net.norm.std[2] > 2 * net.norm.std[0] > 0


def test_the_encoder_finds_the_leaf() -> None:
    encoder = Encoder(POINTS_OBS, points=PointConfig((16,), 8))
    assert encoder.size == 3 + 8 and encoder.vectors == ["state"] and encoder.sets == ["points"]
    batch = rows()
    encoder.fit({f"obs/{name}": value for name, value in batch.items()})
    out = encoder(batch)
    torch.testing.assert_close(out[:, :3].mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    mixed = {**batch, "points": batch["points"].flip(1)}
    torch.testing.assert_close(encoder(mixed), out)
    only = Encoder({"points": POINTS_OBS["points"]})
    assert only(batch).shape == (4, 64)
    only.fit({"obs/points": batch["points"]})
    with pytest.raises(ConfigError, match="points"):
        encoder.only_vectors()


def test_not_every_matrix_is_a_set() -> None:
    assert POINTS_OBS["points"].is_points and not POINTS_OBS["points"].is_image
    assert not Leaf((20, 6)).is_points, "a matrix of numbers"
    assert not Leaf((4, 20, 3), unit="points").is_points, "a history of sets"
    assert Encoder({"places": Leaf((5, 3), unit="m")}).size == 15


def test_nothing_to_see_and_a_head_that_does_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to see"):
        Encoder({"critic/force": Leaf((3,))})
    with pytest.raises(ConfigError, match="head='mean' is not allowed"):
        make("resnet", "mean")
