"""The oracle of every robot configuration: what its chain may send, whatever was asked of it."""

from __future__ import annotations

import numpy as np

from embodied.real_robot.assemble import build_regions
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.kernel.arm_state import Floats
from tests.real_robot.test_chain import within

TOLERANCE = 5e-3  # m: what a motion to rest may lead out between two samples


class Oracle:
    """`begin` where the set-point stands, `take` what is sent in every tick, `check` now and then:
    limits of position, velocity, acceleration and jerk across all of it; regions never further out
    than it began, or by TOLERANCE (m)."""

    def __init__(self, made: Deployment, q: Floats) -> None:
        self.limits, self.dt = made.limits, 1 / made.hertz
        self.regions = build_regions(made)
        self.worst = np.zeros(len(self.regions))
        """How far out (m) of each region, beyond where it began, it ever was."""
        self.begin(q)

    def begin(self, q: Floats) -> None:
        """The set-point rests at `q` [n]; nothing of before counts."""
        self.sent = [q.copy()] * 4
        self.best = np.full(len(self.regions), -np.inf)

    def take(self, q: Floats) -> None:
        """Note what was sent [n]."""
        self.sent.append(q.copy())

    def check(self) -> None:
        """Hold what was sent against every limit; derivatives across the seam as well."""
        sent = np.stack(self.sent)
        within(sent, self.limits, self.dt)
        for i, region in enumerate(self.regions):
            inside = np.minimum(region.depths(sent), 0.0)
            inside[0] = max(inside[0], self.best[i])
            reached = np.maximum.accumulate(inside)
            self.worst[i] = max(self.worst[i], float((reached - inside).max()))
            self.best[i] = reached[-1]
            assert self.worst[i] <= TOLERANCE, f"{region.name}: out by {self.worst[i]:.4f} m"
        self.sent = self.sent[-4:]
