"""GripperPoint by hand: what is read at the gripper's point; a dense actor acts the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import POINTS, Leaf, Spec
from embodied.learners.critics import Critic
from embodied.policies.networks.gripper_point import RADIUS, GripperPoint, WholeCloud
from tests.builders import make_policy

CLOUD = Leaf((8, 6), unit=POINTS)
SPEC = Spec({"points": CLOUD}, Leaf((2,), low=-1.0, high=1.0), 0.1)
NAME = "embodied.policies.networks.gripper_point.GripperPoint"
GRIPPER = 3


def clouds(n: int = 4) -> Tensor:
    torch.manual_seed(0)
    kinds = torch.eye(3)[[0, 1, 0, 2, 1, 1, 0, 1]].expand(n, -1, -1)
    return torch.cat([0.1 * torch.randn(n, 8, 3), kinds], 2)


def test_the_action_is_a_dense_networks_output_at_the_gripper() -> None:
    """The head on the features of all points, then a gather at the gripper's point."""
    policy = make_policy("gaussian.Gaussian", SPEC, extractor=NAME, hidden=[16])
    cloud = clouds()
    every = torch.arange(8).expand(4, -1)
    dense = policy.net(policy.encoder.at(cloud, every))  # [4, 8, 2 A]
    mean, _ = policy({"points": cloud})
    assert torch.allclose(mean, dense[:, GRIPPER, :2], atol=1e-6)
    assert not torch.allclose(mean, dense[:, 0, :2], atol=1e-3)


def test_features_by_hand() -> None:
    """The gripper's own, the largest of its neighbours' within the radius, the global feature."""
    encoder = GripperPoint({"points": CLOUD})
    cloud = clouds(1)
    net: Any = encoder.clouds[0]
    each = net.each(net.norm(cloud))[0]
    offset = (cloud[0, :, :3] - cloud[0, GRIPPER, :3]) / RADIUS
    near = offset.norm(dim=1) < 1
    assert 1 < near.sum() < 8
    local = encoder.around(torch.cat([each, offset], 1))[near].amax(0)
    whole = net.project(each.amax(0))
    expected = torch.cat([each[GRIPPER], local, whole])
    assert torch.allclose(encoder({"points": cloud})[0], expected, atol=1e-5)


def test_the_order_of_points_does_not_matter() -> None:
    encoder = GripperPoint({"points": CLOUD})
    cloud = clouds()
    turned = cloud[:, torch.randperm(8)]
    assert torch.allclose(encoder({"points": cloud}), encoder({"points": turned}), atol=1e-5)


def test_a_critic_has_the_action_beside_the_features_at_the_gripper() -> None:
    spec = Spec({"points": CLOUD, "full": CLOUD}, SPEC.act, 0.1)
    critic = Critic(spec, 2, 2, (16,), extractor=NAME)
    cloud, action = clouds(), torch.rand(4, 2)
    q = critic({"full": cloud, "points": torch.zeros_like(cloud)}, action)
    features = critic.encoder.at(cloud, torch.full((4, 1), GRIPPER))[:, 0]
    expected = critic.ensemble(torch.cat([features, action], 1)).squeeze(-1)
    assert torch.allclose(q, expected)


def test_which_cloud_is_seen() -> None:
    both = {"points": CLOUD, "full": CLOUD, "state": Leaf((3,))}
    assert WholeCloud(both).names == ["points"]
    assert WholeCloud(both, asymmetric=True).names == ["full"]
    assert WholeCloud({"full": CLOUD}).names == ["full"]
    with pytest.raises(ConfigError, match="needs a point cloud"):
        GripperPoint({"state": Leaf((3,))})
