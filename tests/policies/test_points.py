"""The point encoder: order does not matter, values do."""

from __future__ import annotations

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.policies.generative.flow import Config, Flow
from embodied.policies.networks.encoders import Encoder, PointConfig, PointNet

OBS = {"points": Leaf((20, 6), unit="points"), "state": Leaf((3,))}
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
    encoder = Encoder(OBS, points=PointConfig((16,), 8))
    assert encoder.size == 3 + 8 and encoder.vectors == ["state"] and encoder.sets == ["points"]
    batch = rows()
    encoder.fit({f"obs/{name}": value for name, value in batch.items()})
    out = encoder(batch)
    torch.testing.assert_close(out[:, :3].mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    mixed = {**batch, "points": batch["points"].flip(1)}
    torch.testing.assert_close(encoder(mixed), out)
    only = Encoder({"points": OBS["points"]})
    assert only(batch).shape == (4, 64)
    only.fit({"obs/points": batch["points"]})
    with pytest.raises(ConfigError, match="points"):
        encoder.only_vectors()


def test_not_every_matrix_is_a_set() -> None:
    assert OBS["points"].is_points and not OBS["points"].is_image
    assert not Leaf((20, 6)).is_points, "a matrix of numbers"
    assert not Leaf((4, 20, 3), unit="points").is_points, "a history of sets"
    assert Encoder({"places": Leaf((5, 3), unit="m")}).size == 15


def test_a_policy_learns_from_points() -> None:
    """The action is where the points' middle is: only the cloud says so."""
    torch.manual_seed(0)
    spec = Spec({"points": Leaf((16, 3), unit="points")}, ACT, dt=0.1)
    config = Config(chunk=1, points=PointConfig((32, 64), 32), width=64)
    policy = Flow(config, spec)
    middle = torch.rand(256, 2) * 1.6 - 0.8
    cloud = torch.randn(256, 16, 3) * 0.1
    cloud[..., :2] += middle[:, None]
    batch = {"obs/points": cloud, "action": middle[:, None], "valid": torch.ones(256, 1).bool()}
    policy.fit(batch)
    adam = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(150):
        adam.zero_grad()
        policy.loss(batch).mean().backward()
        adam.step()
    fresh = torch.rand(100, 2) * 1.2 - 0.6
    seen = torch.randn(100, 16, 3) * 0.1
    seen[..., :2] += fresh[:, None]
    with torch.no_grad():
        action, _ = policy.act({"points": seen}, {}, policy.sample_noise(100))
    assert (action[:, 0] - fresh).abs().mean() < 0.15, "chance is 0.6"
