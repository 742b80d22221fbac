"""Encoders of one point cloud: its global feature, and the features at the gripper's point.

A network with an output for every point (dense; Wang et al., "One Policy to Dress Them All", 2023)
of which only the output at the gripper's point is an action. Per-point PointNet layers h, the k
nearest points within a radius r, and the global feature g:

    f(p_i) = [h_i, max_{j in kNN(i)} m(h_j, (p_j - p_i) / r), g],    action = head(f(p_gripper))

The head of policy=gaussian is evaluated at that point alone, which gives the same action. As a
critic's encoder: the action joins the features at the gripper's point, and the head gives Q.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.policies.networks.encoders import Encoder, ImageConfig, PointConfig, PointNet
from embodied.policies.networks.point_sets import gather, mlp

SMALL = PointConfig(channels=(64, 64))  # of critics, whose widths are not settings
NEAREST = 16
RADIUS = 0.1  # m


class WholeCloud(Encoder):
    """The global feature of the only cloud; of several, policies see `points` and critics `full`.
    Other observations are ignored."""

    def __init__(
        self,
        obs: Mapping[str, Leaf],
        images: ImageConfig | None = None,
        asymmetric: bool = False,
        points: PointConfig | None = None,
    ) -> None:
        clouds = {name: leaf for name, leaf in obs.items() if leaf.is_points}
        if len(clouds) > 1:
            name = "full" if asymmetric else "points"
            clouds = {key: leaf for key, leaf in clouds.items() if key == name}
        if not clouds:
            raise ConfigError(f"this encoder needs a point cloud, not {sorted(obs)}")
        super().__init__(clouds, points=points or SMALL)


class GripperPoint(WholeCloud):
    """The features at the gripper's point, the one whose last channel is the largest."""

    def __init__(
        self,
        obs: Mapping[str, Leaf],
        images: ImageConfig | None = None,
        asymmetric: bool = False,
        points: PointConfig | None = None,
    ) -> None:
        super().__init__(obs, images, asymmetric, points)
        width = (points or SMALL).channels[-1]
        self.around = mlp(width + 3, width)
        self.size += 2 * width

    def forward(self, obs: Tensors) -> Tensor:
        cloud = obs[self.sets[0]]
        return self.at(cloud, cloud[..., -1].argmax(1, keepdim=True))[:, 0]

    def at(self, cloud: Tensor, index: Tensor) -> Tensor:
        """Features [n, K, size] of the points `index` [n, K] (int64) of clouds [n, N, C]."""
        net = self.clouds[0]
        assert isinstance(net, PointNet)
        each = net.each(net.norm(cloud))
        whole = net.project(each.amax(1))[:, None].expand(-1, index.shape[1], -1)
        place = cloud[..., :3]
        centre = gather(place, index)
        gap, near = torch.cdist(centre, place).topk(min(NEAREST, cloud.shape[1]), largest=False)
        # Beyond the radius the nearest one, the point itself, stands in: no effect on a maximum.
        near = torch.where(gap < RADIUS, near, near[..., :1])
        offset = (gather(place, near) - centre[:, :, None]) / RADIUS
        local = self.around(torch.cat([gather(each, near), offset], 3)).amax(2)
        return torch.cat([gather(each, index), local, whole], 2)
