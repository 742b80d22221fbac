"""Clouds: fuses the depth cameras of a MuJoCo environment into one point cloud per env."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.core.point_cloud import Sampling, cloud, thinned, unproject
from embodied.core.spec import POINTS, Leaf
from embodied.envs.mujoco.cameras import Cameras

Scenes = Iterable[tuple[mujoco.MjModel, mujoco.MjData]]


@dataclass(frozen=True)
class Config(Sampling):
    """Settings of a point cloud from rendered cameras.

    `by`: open3d makes one cloud at a time, torch a batch, cuda a batch on the GPU.
    """

    cameras: tuple[str, ...] = ("front", "wrist")  # depth cameras
    size: Count = 64  # pixels of an image's side
    colour: bool = False  # adds red, green, blue in [0, 1]
    by: Literal["open3d", "torch", "cuda"] = "torch"  # who makes the clouds


class Clouds(Cameras):
    """Camera images by name, and the leaf `points` [N, 3 or 6]: metres in the base frame."""

    def __init__(self, names: tuple[str, ...], size: int, config: Config) -> None:
        super().__init__(names, size)
        if not config.cameras:
            raise ConfigError("clouds: cameras must name at least one camera")
        self.config = config

    def leaves(self) -> dict[str, Leaf]:
        config = self.config
        shape = (config.points, 6 if config.colour else 3)
        return {**super().leaves(), "points": Leaf(shape, unit=POINTS)}

    def observe(self, scenes: Scenes) -> dict[str, NDArray[np.generic]]:
        clouds: list[tuple[NDArray[np.float64], NDArray[np.float64] | None]] = []
        pictures: list[dict[str, NDArray[np.generic]]] = []
        for model, data in scenes:
            pictures.append(super().observe([(model, data)]))
            # All that the cameras see of one scene: points [M, 3] and, where asked for, colours.
            size = self.config.size
            parts = []
            colours = []
            for name in self.config.cameras:
                depth = torch.from_numpy(self.depth(model, data, name, size, size))
                eye = self.pinhole(model, data, name, size, size)
                matrix = torch.from_numpy(eye.matrix)
                pose = torch.from_numpy(eye.pose)
                parts.append(unproject(depth[None], matrix[None], pose[None])[0].numpy())
                if self.config.colour:
                    shades = self.picture(model, data, name, size, size, "observation")
                    colours.append(shades.reshape(-1, 3) / 255)
            clouds.append((np.concatenate(parts), np.concatenate(colours) if colours else None))
        images = {n: np.concatenate([one[n] for one in pictures]) for n in self.names}
        return {**images, "points": self._sample_points(clouds)}

    def _sample_points(
        self, clouds: list[tuple[NDArray[np.float64], NDArray[np.float64] | None]]
    ) -> NDArray[np.float32]:
        config = self.config
        if config.by == "open3d":
            return np.stack([cloud(*one, config) for one in clouds])
        device = "cuda" if config.by == "cuda" else "cpu"
        points = torch.from_numpy(np.stack([one for one, _ in clouds])).to(device)
        colours = [colour for _, colour in clouds if colour is not None]
        shades = torch.from_numpy(np.stack(colours)).to(device) if colours else None
        return thinned(points, shades, config).cpu().numpy()
