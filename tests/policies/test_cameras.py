"""Camera networks: shapes, gradients, what the heads say, and that the default is what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError, build, parse
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.export.decision import Decision, facts
from embodied.export.onnx import write_onnx, write_torchscript
from embodied.policies.networks.image_encoders import (
    Camera,
    ImageConfig,
    Residual,
    SpatialEmbeddings,
    SpatialSoftmax,
)

BODIES, HEADS = ("strided", "resnet"), ("flat", "softmax", "embeddings")
CONFIG = ImageConfig(channels=(8, 16), features=12)


def make(body: str, head: str, shape: tuple[int, ...] = (21, 30, 3), **settings: Any) -> Camera:
    torch.manual_seed(0)
    node = {"channels": [8, 16], "features": 12, "body": body, "head": head, **settings}
    return Camera(shape, parse(ImageConfig, node, "images"))


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
    node = {
        "_target_": "embodied.policies.generative.flow.Flow",
        "chunk": 2,
        "width": 16,
        "images": images,
    }
    eyes = {name: Leaf((20, 16, 3), "uint8") for name in ("base", "wrist")}
    obs = {**eyes, "state": Leaf((3,))}
    policy = build(node, Policy, spec=Spec(obs, Leaf((2,), low=-1.0, high=1.0), dt=0.05))
    decision = Decision(policy)
    written = write_onnx(decision, facts(decision), tmp_path / "policy.onnx")
    assert written.difference is not None and written.difference <= 1e-5
    write_torchscript(decision, facts(decision), tmp_path / "policy.pt")


def test_a_head_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="head='mean' is not allowed"):
        make("resnet", "mean")
