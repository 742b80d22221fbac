"""What encoders see, in which order, and how it is normalised; cameras and point clouds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.build import ConfigError, parse
from embodied.core.spec import DEPTH, Leaf
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
from tests.builders import SPEC, make_policy

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
    leaves, rows = {"b": Leaf((2,)), "text": text_leaf(8)}, {"text": encode(["lift"], 8)}
    for asymmetric in (False, True):
        assert Encoder(leaves, asymmetric=asymmetric)(rows | {"b": ROWS["b"]}).tolist() == [[7, 8]]


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
    camera, seen = make(body, head), pictures(5)
    features = camera(seen)
    assert features.shape == (5, 12)
    # Rows do not see each other: no statistics over the batch, in training either.
    torch.testing.assert_close(camera.train()(seen[:1]), features[:1], atol=1e-5, rtol=0)
    features[:, 0].sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in camera.parameters() if p.ndim)
    tiny = make(body, head, (3, 5, 1), channels=[8, 8, 8, 8])
    assert tiny(pictures(2, (3, 5, 1))).isfinite().all()


def test_the_default_camera_by_torch() -> None:
    camera, seen = make("strided", "flat"), pictures(3)
    state = camera.state_dict()

    def both(layer: str) -> tuple[Tensor, Tensor]:
        return state[f"{layer}.weight"], state[f"{layer}.bias"]

    h = seen.permute(0, 3, 1, 2) / 255 - 0.5
    for layer in ("convolve.0", "convolve.2"):
        h = functional.conv2d(h, *both(layer), stride=2, padding=1).relu()
    h = functional.linear(h.flatten(1), *both("project.1"))
    expected = functional.layer_norm(h, (12,), *both("project.2")).tanh()
    torch.testing.assert_close(camera(seen), expected)


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


@pytest.mark.parametrize(
    ("body", "head", "shared"), [("resnet", "softmax", True), ("resnet", "embeddings", False)]
)
def test_camera_policies_export(body: str, head: str, shared: bool, tmp_path: Path) -> None:
    """Both files are compared with PyTorch as they are written, and not written beyond 1e-5."""
    images = {"body": body, "head": head, "shared": shared, "channels": [8, 16]}
    spec = SPEC.with_obs(base=Leaf((20, 16, 3), "uint8"), wrist=Leaf((20, 16, 3), "uint8"))
    policy = make_policy("generative.flow.Flow", spec, chunk=2, width=16, images=images)
    decision = Decision(policy)
    written = write_onnx(decision, facts(decision), tmp_path / "policy.onnx")
    assert written.difference is not None and written.difference <= 1e-5
    write_torchscript(decision, facts(decision), tmp_path / "policy.pt")


def test_distances_are_a_picture_and_near_ones_count_most() -> None:
    torch.manual_seed(0)
    depth = Leaf((20, 16, 1), low=0.0, unit=DEPTH)
    encoder = Encoder({"depth": depth, "state": Leaf((3,))}, CONFIG)
    assert (encoder.images, encoder.vectors) == (["depth"], ["state"])

    def seen(far: float) -> Tensor:
        return encoder({"depth": torch.full((1, 20, 16, 1), far), "state": torch.zeros(1, 3)})

    near, distant = ((seen(far + 0.05) - seen(far)).abs().max() for far in (0.3, 3.0))
    assert near > 3 * distant > 0 and seen(-1.0).isfinite().all()
    with pytest.raises(ConfigError, match="one shape and kind"):
        eyes = {"depth": depth, "grey": Leaf((20, 16, 1), "uint8")}
        Encoder(eyes, ImageConfig(channels=(8,), shared=True))


def test_cameras_of_any_size_each_with_its_own_network() -> None:
    obs = {"front": Leaf((33, 47, 3), "uint8"), "depth": Leaf((20, 20, 1), "uint8")}
    rows = {name: pictures(2, leaf.shape) for name, leaf in obs.items()}
    encoder = Encoder({**obs, "state": Leaf((4,))})
    features = encoder({**rows, "state": torch.randn(2, 4)})
    assert features.shape == (2, encoder.size) == (2, 4 + 64 + 64)
    assert Encoder(obs)(rows).shape == (2, 128)


def test_order_and_repeats_of_points_do_not_matter_and_all_share_a_normaliser() -> None:
    net, points = PointNet(6, PointConfig()), torch.rand(500, 20, 6)
    points[:, :, :3] *= torch.tensor([1.0, 2.0, 3.0])
    net.fit(points)
    torch.testing.assert_close(net.norm.mean, points.mean((0, 1)))
    assert net.norm.std[2] > 2 * net.norm.std[0] > 0
    out = net(points)
    assert out.shape == (500, 64)
    torch.testing.assert_close(net(points[:, torch.randperm(20)]), out)
    torch.testing.assert_close(net(torch.cat([points, points[:, :7]], 1)), out)
    assert not torch.allclose(net(points + 0.1), out, atol=1e-3)


def test_the_encoder_finds_the_leaf_of_points() -> None:
    leaf, points = Leaf((20, 6), unit="points"), torch.rand(4, 20, 6)
    encoder = Encoder({"points": leaf, "state": Leaf((3,))}, points=PointConfig((16,), 8))
    assert encoder.size == 3 + 8 and encoder.vectors == ["state"] and encoder.sets == ["points"]
    batch = {"points": points, "state": torch.rand(4, 3)}
    encoder.fit({f"obs/{name}": value for name, value in batch.items()})
    torch.testing.assert_close(encoder({**batch, "points": points.flip(1)}), encoder(batch))
    assert Encoder({"points": leaf})(batch).shape == (4, 64)
    with pytest.raises(ConfigError, match="points"):
        encoder.only_vectors()
    assert leaf.is_points and not leaf.is_image
    assert not Leaf((20, 6)).is_points, "a matrix of numbers"
    assert not Leaf((4, 20, 3), unit="points").is_points, "a history of sets"
    assert Encoder({"places": Leaf((5, 3), unit="m")}).size == 15


def test_nothing_to_see_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to see"):
        Encoder({"critic/force": Leaf((3,))})
