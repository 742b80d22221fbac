"""LargestCluster: the usual heuristic for grasping in clutter, the baseline of learned proposals.

Points above the table are linked at 1.5 cm; of the largest cluster the hand takes the middle, from
straight above, closing along its shorter principal axis in the plane, 2 cm below its top.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components
from scipy.spatial import KDTree
from torch import Tensor

from embodied.core.bounds import Positive
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.embodiments.cartesian_pose import CartesianPose
from embodied.embodiments.cartesian_pose import Config as PoseConfig
from embodied.embodiments.fr3 import OPEN
from embodied.policies.networks.point_sets import TABLE


@dataclass(frozen=True)
class Config:
    """Settings of the heuristic."""

    link: Positive = 0.015  # m: points so near belong to one cluster
    deep: Positive = 0.02  # m: how far the tool point is below the cluster's top


class LargestCluster(Policy):
    """Grasps only: what to do with a held object it does not know."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.pose = CartesianPose(PoseConfig())
        if spec.act.names != self.pose.names or "points" not in spec.obs:
            raise ConfigError("largest_cluster needs env=grasping: points, and poses as actions")
        self.config = config
        self.spec = spec

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.zeros(n, 1)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        rows = [self.grasp(cloud) for cloud in obs["points"].double().cpu().numpy()]
        return torch.from_numpy(np.stack(rows)).float().clamp(-1, 1)[:, None], carry

    def grasp(self, cloud: np.ndarray) -> np.ndarray:
        """The action [A] for one cloud [N, 3] (m)."""
        points = cloud[cloud[:, 2] > TABLE]
        if not len(points):
            return np.zeros(len(self.pose.names))
        pairs = KDTree(points).sparse_distance_matrix(KDTree(points), self.config.link)
        _, label = connected_components(pairs)
        largest = points[label == np.bincount(label).argmax()]
        top = largest[:, 2].max()
        middle = (largest[:, :2].min(0) + largest[:, :2].max(0)) / 2
        _, _, axes = np.linalg.svd(largest[:, :2] - largest[:, :2].mean(0), full_matrices=False)
        short = axes[-1]
        across = (largest[:, :2] - middle) @ short
        closing = np.array([*short, 0.0])
        approach = np.array([0.0, 0.0, -1.0])
        turn = np.stack([np.cross(closing, approach), closing, approach], 1)
        place = np.array([*middle, max(top - self.config.deep, 0.012)])
        width = min(across.max() - across.min(), OPEN)
        return np.append(self.pose.encode(place[None], turn[None])[0], 2 * width / OPEN - 1)
