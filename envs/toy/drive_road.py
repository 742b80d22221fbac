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


CONTACT = 1.3  # m between centres
SOON = 1.0  # s to contact below which there is a conflict
BEHIND = -3.0  # m along the route; nearer obstacles are seen
FAR = 40.0  # likewise, farther ones are not
WIDE = CONTACT  # m to the side within which an obstacle is in the way
STOP = 2.0  # m before an obstacle in the way: standing
SLOW = 10.0  # m before it: slowing down
CORNER = 4.0  # m/s^2 of lateral acceleration in a bend


def turned(vectors: Tensor, yaw: Tensor) -> Tensor:
    """Vectors [n, M, 2] in the frames of cars with `yaw` [n]."""
    x, y = vectors.unbind(2)
    cos, sin = yaw.cos()[:, None], yaw.sin()[:, None]
    return torch.stack([x * cos + y * sin, y * cos - x * sin], 2)


def _velocity(car: Tensor) -> Tensor:
    return car[:, 3, None] * torch.stack([car[:, 2].cos(), car[:, 2].sin()], 1)


def nearest(car: Tensor, station: Tensor, obstacles: Obstacles, count: int) -> Tensor:
    """Relative positions and velocities of the `count` next obstacles along the route, in the car's
    frame, [n, 4 count]; one that is out of sight stands `FAR` ahead."""
    gap = obstacles.station - station[:, None]
    key = torch.where((gap > BEHIND) & (gap < FAR), gap, torch.inf)
    first, index = key.topk(count, 1, largest=False)
    hidden = first.isinf()[..., None]
    index = index[..., None].expand(-1, -1, 2)
    away = obstacles.place.gather(1, index) - car[:, None, :2]
    speed = obstacles.velocity.gather(1, index) - _velocity(car)[:, None]
    away = torch.where(hidden, torch.tensor([FAR, 0.0]), turned(away, car[:, 2]))
    speed = torch.where(hidden, 0.0, turned(speed, car[:, 2]))
    return torch.cat([away.flatten(1), speed.flatten(1)], 1)


def conflict(car: Tensor, obstacles: Obstacles) -> Tensor:
    """Whether at constant velocities the car touches an obstacle within `SOON` seconds, [n]."""
    away = obstacles.place - car[:, None, :2]
    motion = obstacles.velocity - _velocity(car)[:, None]
    square = motion.square().sum(2).clamp(min=1e-6)
    closing = -(away * motion).sum(2)
    # |away + t motion|^2 = CONTACT^2 has its first root below SOON.
    root = closing.square() - square * (away.square().sum(2) - CONTACT**2)
    time = (closing - root.clamp(min=0).sqrt()) / square
    return ((root >= 0) & (closing > 0) & (time < SOON)).any(1)


def desired_speed(obstacles: Obstacles, place: Tensor, limit: Tensor, bend: Tensor) -> Tensor:
    """The speed [n] of a careful driver: the limit, less in a bend (curvature `bend` [n]) and less
    the closer an obstacle in the way is. `place`: station and offset of the car."""
    gap = obstacles.station - place[:, :1]
    beside = (obstacles.offset - place[:, 1:2]).abs() > WIDE
    free = torch.where((gap < 0) | beside, torch.inf, gap).amin(1)
    share = ((free - STOP) / (SLOW - STOP)).clamp(0, 1)
    return torch.minimum(limit, (CORNER / bend.abs().clamp(min=1e-3)).sqrt()) * share
