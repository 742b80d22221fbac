"""Roads of Drive: a winding route with speed limits and obstacles for each parallel env.

    heading(s) = sum_k a_k sin(2 pi s / l_k + f_k),   |heading| < pi / 2: it never crosses itself

Stations s are metres along the route. Tables have one entry per metre; between entries the route is
an arc. Offsets d are metres to the left of the route.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.envs.row_rng import RowRng

WAVES = 3
AMPLITUDE = 0.45  # rad
WAVELENGTH = (40.0, 100.0)  # m
LIMITS = (4.0, 6.0, 8.0)  # m/s
SEGMENT = 40  # m
TAIL = 40  # m that the route continues behind its end
NOWHERE = -1000.0  # station of obstacles that are missing
FIRST = 25.0  # station of the first obstacle
WINDOW = torch.arange(-1, 4)  # entries around the last one in which the nearest one is looked for
X, Y, HEADING, CURVATURE, LIMIT = range(5)


@dataclass(frozen=True)
class Obstacles:
    """Obstacles of n envs: station, offset [n, K]; `place`, `velocity` [n, K, 2]."""

    station: Tensor
    offset: Tensor
    place: Tensor
    velocity: Tensor


class Roads:
    """`table` [B, entries, 5]: x, y, heading, curvature, speed limit; `traffic` [B, K, 6]: of each
    obstacle the station, speed, mean offset, and amplitude, rate and phase of its crossing. K is at
    least `seen`: obstacles that are missing stand far behind."""

    def __init__(self, num_envs: int, length: int, obstacles: int, seen: int) -> None:
        self.length = length
        self.obstacles = obstacles
        self.table = torch.zeros(num_envs, length + TAIL, 5)
        self.traffic = torch.zeros(num_envs, max(obstacles, seen, 1), 6)
        self.traffic[..., 0] = NOWHERE

    def begin(self, streams: RowRng, rows: Tensor) -> None:
        """New roads in the envs `rows` [n]."""
        segments = -(-(self.length + TAIL) // SEGMENT)
        counts = [3 * WAVES, segments, 5 * self.obstacles]
        waves, limits, traffic = streams.uniform(sum(counts), rows).T.split(counts, 1)
        table = torch.empty(len(rows), self.length + TAIL, 5)
        self._wind(table, waves.unflatten(1, (3, WAVES)))
        choice = (limits * len(LIMITS)).long().clamp(max=len(LIMITS) - 1)
        limit = torch.tensor(LIMITS)[choice].repeat_interleave(SEGMENT, 1)
        table[..., LIMIT] = limit[:, : self.length + TAIL]
        self.table[rows] = table
        # Obstacles from uniform numbers [n, 5, K]: 40% stand at a side of the lane, 30% ride along
        # it, 30% cross the road back and forth.
        kind, along, side, size, phase = traffic.unflatten(1, (5, self.obstacles)).unbind(1)
        slot = (self.length - FIRST - 10) / max(self.obstacles, 1)
        station = FIRST + slot * (torch.arange(self.obstacles) + 0.8 * along)
        stands = kind < 0.4
        crosses = kind >= 0.7
        speed = torch.where(stands | crosses, 0.0, 2.0 + 1.5 * size)
        offset = torch.where(stands, 0.7 + 0.7 * size, 1.3) * torch.where(side < 0.5, -1.0, 1.0)
        rate = 2 * math.pi / (7.0 + 5.0 * size)
        parts = (station, speed, offset * ~crosses, 2.5 * crosses, rate, 2 * math.pi * phase)
        placed = torch.stack(parts, 2)
        self.traffic[rows, : self.obstacles] = placed

    def _wind(self, table: Tensor, lots: Tensor) -> None:
        """Fill positions, headings and curvatures in from uniform numbers [n, 3, WAVES]."""
        amplitude = AMPLITUDE * lots[:, 0]
        shortest = WAVELENGTH[0]
        rate = 2 * math.pi / (shortest + (WAVELENGTH[1] - shortest) * lots[:, 1])
        station = torch.arange(table.shape[1])[None, :, None]
        phase = rate[:, None] * station + 2 * math.pi * lots[:, None, 2]
        table[..., HEADING] = (amplitude[:, None] * phase.sin()).sum(2)
        table[..., CURVATURE] = ((amplitude * rate)[:, None] * phase.cos()).sum(2)
        middle = table[:, :-1, HEADING] + 0.5 * table[:, :-1, CURVATURE]
        table[:, 0, :2] = 0.0
        table[:, 1:, X] = middle.cos().cumsum(1)
        table[:, 1:, Y] = middle.sin().cumsum(1)

    def look_up(self, station: Tensor, rows: Tensor) -> Tensor:
        """Return x, y, heading, curvature and limit [n, M, 5] at stations [n, M] of the envs
        `rows`."""
        entry = station.round().clamp(0, self.length + TAIL - 1)
        ahead = station.clamp(max=self.length + TAIL - 1.0) - entry
        flat = (rows[:, None] * (self.length + TAIL) + entry.long()).flatten()
        found = self.table.view(-1, 5).index_select(0, flat).view(*station.shape, 5)
        x, y, heading, curvature, limit = found.unbind(2)
        middle = heading + 0.5 * ahead * curvature
        x, y = x + ahead * middle.cos(), y + ahead * middle.sin()
        return torch.stack([x, y, heading + ahead * curvature, curvature, limit], 2)

    def project(self, place: Tensor, near: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Station and offset [n] of positions [n, 2] that are close to the stations `near` [n]."""
        window = (near.round().long()[:, None] + WINDOW).clamp(0, self.length + TAIL - 1)
        flat = (rows[:, None] * (self.length + TAIL) + window).flatten()
        entries = self.table.view(-1, 5).index_select(0, flat).view(*window.shape, 5)
        away = place[:, None] - entries[..., :2]
        best = away.square().sum(2).argmin(1, keepdim=True)
        entry = entries.gather(1, best[..., None].expand(-1, -1, 5)).squeeze(1)
        dx, dy = (place - entry[:, :2]).unbind(1)
        cos, sin = entry[:, HEADING].cos(), entry[:, HEADING].sin()
        ahead = dx * cos + dy * sin
        left = dy * cos - dx * sin
        station = window.gather(1, best).squeeze(1) + ahead
        return station, left - 0.5 * entry[:, CURVATURE] * ahead.square()

    def advance(self, dt: float) -> None:
        """Move all obstacles by `dt` s."""
        station, speed, _, _, rate, phase = self.traffic.unbind(2)
        station.add_(speed, alpha=dt)
        phase.add_(rate, alpha=dt)

    def obstacles_of(self, rows: Tensor) -> Obstacles:
        """The obstacles of the envs `rows`, with their places and velocities."""
        station, speed, mean, amplitude, rate, phase = self.traffic[rows].unbind(2)
        offset = mean + amplitude * phase.sin()
        sideways = amplitude * rate * phase.cos()
        x, y, heading, _, _ = self.look_up(station, rows).unbind(2)
        cos, sin = heading.cos(), heading.sin()
        place = torch.stack([x - offset * sin, y + offset * cos], 2)
        velocity = torch.stack([speed * cos - sideways * sin, speed * sin + sideways * cos], 2)
        return Obstacles(station, offset, place, velocity)
