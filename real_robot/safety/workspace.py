"""Workspace: a box that the tool stays in, and half-spaces (a table, a person's side) to avoid.

A target whose tool would leave is pulled back along the straight line, in joint space, from the
positions sent last: to the furthest point of that line that is still inside, by bisection. A tool
that is outside already may only move closer to the inside. The limiter takes `depth` as its guard,
so that neither the path to a target nor a motion to rest leaves the workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from embodied.core.build import ConfigError
from real_robot.control.arm_state import ArmState, Floats
from real_robot.safety.chain import Tick

Forward = Callable[[Floats], Floats]
"""Tool positions [k, 3] (m, base frame) at joint positions [k, n]."""
HALVINGS = 12


@dataclass(frozen=True)
class Config:
    """Base frame, m. `planes`: (a, b, c, d) each, the tool stays where a x + b y + c z >= d."""

    low: tuple[float, float, float]
    high: tuple[float, float, float]
    planes: tuple[tuple[float, float, float, float], ...] = ()


class Workspace:
    """Defined for every target; where no point of the line is inside, the arm stays."""

    name: ClassVar[str] = "workspace"

    def __init__(self, config: Config, forward: Forward) -> None:
        low, high = np.asarray(config.low, float), np.asarray(config.high, float)
        if not (low < high).all():
            raise ConfigError("safety.workspace: low should be below high on every axis")
        normals = [plane[:3] for plane in config.planes]
        lengths = [float(np.linalg.norm(normal)) for normal in normals]
        if any(length < 1e-9 for length in lengths):
            raise ConfigError("safety.workspace: a plane's normal (a, b, c) should not be zero")
        eye = np.eye(3)
        pairs = zip(config.planes, lengths, strict=True)
        planes = [np.asarray(plane) / length for plane, length in pairs]
        self.normals = np.stack([*eye, *-eye, *(plane[:3] for plane in planes)])
        self.offsets = np.array([*low, *-high, *(plane[3] for plane in planes)])
        self.forward = forward
        self._trial = np.zeros(0)

    def begin(self, arm: ArmState) -> None:
        self._trial = np.zeros_like(arm.q)

    def depth(self, q: Floats) -> float:
        """How far inside the tool is at the worst of positions [k, n], m; negative: outside."""
        return float((self.forward(q) @ self.normals.T - self.offsets).min())

    def __call__(self, tick: Tick) -> None:
        if self._trial.shape != tick.q.shape:
            self._trial = np.zeros_like(tick.q)
        # Outside already: anything that is less far outside will do.
        enough = min(0.0, self.depth(tick.last[None]))
        wanted = self.depth(tick.q[None])
        if wanted >= 0 or (enough < 0 and wanted > enough):
            return
        near, far = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = 0.5 * (near + far)
            np.subtract(tick.q, tick.last, out=self._trial)
            self._trial *= middle
            self._trial += tick.last
            near, far = (middle, far) if self.depth(self._trial[None]) >= enough else (near, middle)
        tick.q -= tick.last
        tick.q *= near
        tick.q += tick.last
