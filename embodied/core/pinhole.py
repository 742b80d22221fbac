"""A pinhole camera: how pixels and places belong together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Pinhole:
    """A camera at one moment: `matrix` K [3, 3] (pixels), `pose` T [4, 4] (m), camera to base."""

    matrix: Array
    pose: Array


def pinhole_matrix(fov: float, width: int, height: int) -> Array:
    """The matrix K of a camera with square pixels that sees `fov` degrees from top to bottom."""
    focal = height / 2 / np.tan(np.radians(fov) / 2)
    return np.array([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1.0]])
