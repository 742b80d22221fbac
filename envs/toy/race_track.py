"""Track: a closed planar track with walls; its centre line has three lobes in polar coordinates.

    r(phi) = R (1 + a cos 3 phi),   off = (rho - r) / sqrt(1 + (r' / r)^2)

`off` is the distance from the centre line, to first order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Count, Fraction, Positive


@dataclass(frozen=True)
class Track:
    """The track: a bent ring."""

    size: Positive = 5.0  # mean radius R of the middle line, m
    bend: Fraction = 0.2  # relative amplitude a of the radius
    half: Positive = 0.9  # half the width, m
    goals: Count = 15  # goals on the middle line, evenly by angle

    def radius(self, angle: Tensor) -> Tensor:
        """The radius of the middle line (m) at `angle` (rad)."""
        return self.size * (1 + self.bend * torch.cos(3 * angle))

    def slope(self, angle: Tensor) -> Tensor:
        """The derivative dr / d phi of the radius (m)."""
        return -3 * self.size * self.bend * torch.sin(3 * angle)

    def off(self, place: Tensor) -> Tensor:
        """Signed distance of positions [..., 2] from the centre line (m, positive outside)."""
        angle = torch.atan2(place[..., 1], place[..., 0])
        radius = self.radius(angle)
        slope = self.slope(angle)
        return (place.norm(dim=-1) - radius) / torch.sqrt(1 + (slope / radius).square())

    def inside(self, place: Tensor) -> Tensor:
        """Whether places [..., 2] are between the walls."""
        return self.off(place).abs() < self.half

    def middle(self, angle: Tensor) -> tuple[Tensor, Tensor]:
        """Places [n, 2] (m) of the middle line at `angle` [n], and its heading there [n] (rad)."""
        radius = self.radius(angle)
        slope = self.slope(angle)
        cos, sin = torch.cos(angle), torch.sin(angle)
        place = torch.stack([radius * cos, radius * sin], -1)
        heading = torch.atan2(slope * sin + radius * cos, slope * cos - radius * sin)
        return place, heading

    def goal(self, number: Tensor) -> Tensor:
        """Places [n, 2] (m) of goals [n] (int64)."""
        return self.middle(2 * math.pi * number / self.goals)[0]

    def next_goal(self, place: Tensor) -> Tensor:
        """The number [n] of the first goal that is ahead of places [n, 2], by angle."""
        angle = torch.atan2(place[:, 1], place[:, 0]) / (2 * math.pi) * self.goals
        return (angle.floor().long() + 1) % self.goals

    def sight(self, place: Tensor, heading: Tensor, rays: Tensor, reach: float) -> Tensor:
        """Distances [n, k] (m, at most `reach`) to the walls along `rays` [k] (rad from the
        heading), to a precision of 0.2 m.
        """
        steps = torch.arange(1, round(reach / 0.2) + 1) * 0.2
        angle = heading[:, None] + rays
        ways = torch.stack([angle.cos(), angle.sin()], -1)
        points = place[:, None, None] + steps[:, None] * ways[:, :, None]
        open_ = self.inside(points).cumprod(2).sum(2)
        return 0.2 * open_.clamp(max=len(steps))
