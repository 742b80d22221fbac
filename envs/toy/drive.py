"""Drive: a car follows a winding route past standing, riding and crossing obstacles.

A kinematic car whose acceleration and curvature follow the commands with a lag:

    v' = clip(v + a dt, 0, FAST),   yaw' = clip(v c, +-GRIP / v)

A collision and leaving the road terminate an episode; the end of the route and the time limit
truncate it. The reward is the change of a driving score, so that the return is the score: the
percentage of the route that was driven inside the lane and within the speed limit, halved by a
collision or by leaving the road. Rewards for training read `privileged/events` and `critic/clocks`.

A road is a winding route with speed limits and obstacles for each parallel env:

    heading(s) = sum_k a_k sin(2 pi s / l_k + f_k),   |heading| < pi / 2: it never crosses itself

Stations s are metres along the route. Tables have one entry per metre; between entries the route is
an arc. Offsets d are metres to the left of the route.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero
from embodied.core.build import ConfigError
from embodied.core.env import StateRoles, Step
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv, paint, paint_discs, pixel_grid, turned_by
from embodied.envs.row_rng import RowRng

WAVES = 3
AMPLITUDE = 0.45  # rad
WAVELENGTH = (40.0, 100.0)  # m
SPEED_LIMITS = (4.0, 6.0, 8.0)  # m/s
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
        choice = (limits * len(SPEED_LIMITS)).long().clamp(max=len(SPEED_LIMITS) - 1)
        limit = torch.tensor(SPEED_LIMITS)[choice].repeat_interleave(SEGMENT, 1)
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
        self.traffic[rows, : self.obstacles] = torch.stack(parts, 2)

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
    away = torch.where(hidden, torch.tensor([FAR, 0.0]), turned_by(away, -car[:, 2:3]))
    speed = torch.where(hidden, 0.0, turned_by(speed, -car[:, 2:3]))
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


DT = 0.1  # s
FAST = 10.0  # m/s
PUSH = 2.5  # m/s^2
BRAKE = 5.0  # m/s^2
GRIP = 6.0  # m/s^2
BEND = 0.2  # 1/m
LAG = 0.5  # share of a command that is reached in one step
LANE = 1.75  # m on each side of the route
ROAD = 3.5  # likewise
CENTRE = 0.5  # m from the route within which the car is centred
TOLERANCE = 0.5  # m/s above the limit that break no rule
PENALTY = 0.5  # factor of the score after a collision or off the road
SHORTEST = 40  # m of route, so that obstacles have room
LONG = 20.0  # s: largest value of a clock
AHEAD = torch.tensor([3.0, 6.0, 10.0, 15.0, 22.0, 30.0])  # m: points of the route that are seen
SIGNS = torch.tensor([5.0, 15.0])  # m: speed limits that are seen
STATE = (
    *("speed", "acceleration", "yaw_rate", "curvature", "offset", "heading"),
    *("limit", *(f"limit_{int(s)}" for s in SIGNS), "last_throttle", "last_steer"),
)
LIMITS = ("longitudinal", "lateral", "jerk", "longitudinal_jerk", "yaw_rate", "yaw_acceleration")
"""Of a comfortable ride, as in nuPlan: see `_uncomfortable`."""
CLOCKS = (
    *("remaining", "off_centre_time", "since_conflict"),
    *(f"since_{name}" for name in LIMITS),
)
EVENTS = (
    *("progress", "collided", "off_road", "off_centre", "over_limit"),
    *("speed_error", "heading_error", "steering_change"),
)
COLLIDED = EVENTS.index("collided")
OFF_ROAD = EVENTS.index("off_road")


HALF = 12.0  # m from the middle of the map to its upper edge
GROUND = (150, 165, 140)
SHOULDER = (200, 200, 195)
TARMAC = (235, 235, 230)
OBSTACLE = (230, 140, 40)
CAR = (200, 60, 50)
NOSE = (120, 30, 25)


@dataclass(frozen=True)
class Config:
    """Settings of the driving task."""

    num_envs: Count = 16  # parallel environments
    length: Count = 200  # of the route, m
    horizon: Count = 600  # steps of 0.1 s of an episode
    obstacles: CountOrZero = 6  # per route
    seen: CountOrZero = 3  # obstacles that the observation has
    goal_terminates: bool = False  # the end of the route terminates instead of truncating
    seed: CountOrZero = 0  # of the random numbers


class Drive(BatchedEnv):
    """Observations: `state`, points of the `route` ahead and the nearest `obstacles` in the car's
    frame; `critic/clocks`: what remains of the route, for how long the car has been off centre and
    how long ago other rules were broken (s); `critic/time_left`; `privileged/events` of the last
    step. Actions: throttle (negative: brake) and steering.
    """

    name = "drive"
    kept: ClassVar = {
        **{key: key for key in ("car", "place", "last", "since", "broken", "events", "age")},
        **{"generator": "streams.state", "road": "roads.table", "traffic": "roads.traffic"},
    }
    keeps_obs = True

    def __init__(self, config: Config) -> None:
        if config.length < SHORTEST:
            raise ConfigError(f"drive: length={config.length} must be at least {SHORTEST} m")
        self.config = config
        self.num_envs = config.num_envs
        n = config.num_envs
        ahead = [f"route_{axis}{int(s)}" for s in AHEAD for axis in "xy"]
        near = [f"obstacle{i}_{axis}" for i in range(self.config.seen) for axis in ("x", "y")]
        near += [f"obstacle{i}_v{axis}" for i in range(self.config.seen) for axis in ("x", "y")]
        leaves = {"state": STATE, "route": ahead, "obstacles": near}
        leaves |= {"critic/clocks": CLOCKS, "critic/time_left": ("time_left",)}
        leaves |= {"privileged/events": EVENTS}
        obs = {key: Leaf((len(names),), names=tuple(names)) for key, names in leaves.items()}
        act = Leaf((2,), low=-1.0, high=1.0, names=("throttle", "steer"))
        self.spec = Spec(obs, act, dt=DT, text="drive to the end of the route and hit nothing")
        self.every = torch.arange(n)
        self.streams = RowRng(config.seed, n)
        self.roads = Roads(n, config.length, config.obstacles, config.seen)
        self.car = torch.zeros(n, 7)  # x, y, yaw, speed, acceleration, yaw rate, curvature
        self.place = torch.zeros(n, 4)  # station, offset, furthest station, legal percentage
        self.last = torch.zeros(n, 2)
        self.since = torch.zeros(n, 2 + len(LIMITS))  # off-centre time, since conflict, ...
        self.broken = torch.zeros(n, dtype=torch.bool)  # whether a rule was broken
        self.events = torch.zeros(n, len(EVENTS))  # of the last step
        self.age = torch.zeros(n, dtype=torch.int64)
        self.begin(self.every)
        self.obs = self.observe(self.every)

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        self.roads.begin(self.streams, rows)
        lots = 2 * self.streams.uniform(3, rows) - 1
        start = self.roads.look_up(torch.zeros(len(rows), 1), rows)[:, 0]
        car = torch.zeros(len(rows), 7)
        yaw = start[:, 2]
        offset = 0.3 * lots[0]
        car[:, 0] = start[:, 0] - offset * yaw.sin()
        car[:, 1] = start[:, 1] + offset * yaw.cos()
        car[:, 2] = yaw + 0.1 * lots[1]
        car[:, 3] = 2.0 + lots[2]
        self.car[rows] = car
        self.place[rows] = 0.0
        self.last[rows] = 0.0
        self.place[rows, 1] = offset
        self.since[rows] = LONG
        self.since[rows, 0] = 0.0
        self.broken[rows] = False
        self.events[rows] = 0.0
        self.age[rows] = 0

    def step(self, action: Tensor) -> Step:
        action = action.clamp(-1, 1)
        before = self.car
        furthest = self.place[:, 2]
        self._drive(action)
        self.roads.advance(DT)
        self.age = self.age + 1
        obstacles = self.roads.obstacles_of(self.every)
        # Advance the clocks; a rule that is broken now sets its own to 0.
        now = self.since + DT
        off_centre = self.place[:, 1].abs() > CENTRE
        danger = conflict(self.car, obstacles)[:, None]
        broken = torch.cat([danger, _uncomfortable(before, self.car)], 1)
        held = torch.where(broken, 0.0, now[:, 1:])
        centre = torch.where(off_centre, now[:, 0], 0.0)
        self.since = torch.cat([centre[:, None], held], 1).clamp(max=LONG)
        # EVENTS [B, 8] of the step that led here from the stations `furthest` [B].
        progress = 100 / self.config.length * (self.place[:, 2] - furthest)
        away = obstacles.place - self.car[:, None, :2]
        collided = (away.square().sum(2) < CONTACT**2).any(1)
        station = self.place[:, :1]
        offset = self.place[:, 1].abs()
        speed = self.car[:, 3]
        road = self.roads.look_up(torch.cat([station, station + SIGNS[:1]], 1), self.every)
        limit = road[:, 0, LIMIT]
        wanted = desired_speed(obstacles, self.place, limit, road[:, 1, CURVATURE])
        columns = [progress, collided, offset > ROAD, offset, (speed - limit).relu()]
        columns += [(speed - wanted).abs() / limit, (self.car[:, 2] - road[:, 0, HEADING]).abs()]
        columns += [(action[:, 1] - self.last[:, 1]).abs()]
        self.events = torch.stack([column.float() for column in columns], 1)
        self.last = action.clone()
        reward = self._score()
        lost = (self.events[:, COLLIDED] + self.events[:, OFF_ROAD]) > 0
        won = (self.place[:, 0] >= self.config.length) & ~lost
        late = (self.age >= self.config.horizon) & ~lost & ~won
        stops = self.config.goal_terminates
        terminated, truncated = (lost | won, late) if stops else (lost, late | won)
        log = {"success": won & ~self.broken, "violated": lost}
        following = self._observation(self.every, obstacles)
        return self.finish(following, reward, terminated, truncated, log)

    def _drive(self, action: Tensor) -> None:
        x, y, yaw, speed, acceleration, _, curvature = self.car.unbind(1)
        throttle, steer = action.unbind(1)
        wanted = torch.where(throttle > 0, PUSH * throttle, BRAKE * throttle)
        following = (speed + DT * (acceleration + LAG * (wanted - acceleration))).clamp(0, FAST)
        curvature = curvature + LAG * (BEND * steer - curvature)
        most = GRIP / following.clamp(min=0.1)
        rate = torch.minimum(torch.maximum(following * curvature, -most), most)
        middle = yaw + 0.5 * DT * rate
        x, y = x + DT * following * middle.cos(), y + DT * following * middle.sin()
        acceleration = (following - speed) / DT
        yaw = yaw + DT * rate
        self.car = torch.stack([x, y, yaw, following, acceleration, rate, curvature], 1)
        station, offset = self.roads.project(self.car[:, :2], self.place[:, 0], self.every)
        furthest = torch.maximum(self.place[:, 2], station.clamp(max=self.config.length))
        self.place = torch.stack([station, offset, furthest, self.place[:, 3]], 1)

    def _score(self) -> Tensor:
        """The change [B] of the driving score by the last step."""
        progress, collided, off_road, off_centre, over_limit, *_ = self.events.unbind(1)
        illegal = (off_centre > LANE) | (over_limit > TOLERANCE)
        self.broken = self.broken | illegal
        before = self.place[:, 3].clone()
        legal = before + progress * ~illegal
        self.place[:, 3] = legal
        lost = (collided + off_road) > 0
        return torch.where(lost, PENALTY * legal, legal) - before

    def observe(self, rows: Tensor) -> Tensors:
        return self._observation(rows, self.roads.obstacles_of(rows))

    def _observation(self, rows: Tensor, obstacles: Obstacles) -> Tensors:
        """Observations of `rows` [n]."""
        car = self.car[rows]
        place = self.place[rows]
        here = self.roads.look_up(torch.cat([place[:, :1], place[:, :1] + SIGNS], 1), rows)
        heading = car[:, 2] - here[:, 0, 2]
        own = [car[:, 3:], place[:, 1:2], heading[:, None], here[..., LIMIT], self.last[rows]]
        remaining = 1 - place[:, 2:3] / self.config.length
        ahead = self.roads.look_up(place[:, :1] + AHEAD, rows)[..., :2] - car[:, None, :2]
        return {
            "state": torch.cat(own, 1),
            "route": turned_by(ahead, -car[:, 2:3]).flatten(1),
            "obstacles": nearest(car, place[:, 0], obstacles, self.config.seen),
            "critic/clocks": torch.cat([remaining, self.since[rows]], 1),
            "critic/time_left": 1 - self.age[rows, None] / self.config.horizon,
            "privileged/events": self.events[rows],
        }

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"age": None}, {"generator": None})

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        """A map around the car: the lane light, obstacles orange, the car red."""
        car = self.car[row]
        grid = pixel_grid(width, height, (-HALF, HALF), (-HALF, HALF))
        grid[..., 0] = grid[..., 0] * width / height
        grid = grid + car[:2]
        route = self.roads.table[row, : self.config.length, :2]
        route = route[(route - car[:2]).abs().amax(1) < 2 * HALF * max(width / height, 1)]
        picture = torch.tensor(GROUND, dtype=torch.uint8).repeat(height, width, 1)
        if len(route):
            away = torch.cdist(grid.view(-1, 2), route).amin(1).view(height, width)
            paint(picture, away < ROAD, SHOULDER)
            paint(picture, away < LANE, TARMAC)
        nose = car[:2] + 0.6 * torch.stack([car[2].cos(), car[2].sin()])
        places = self.roads.obstacles_of(self.every[row : row + 1]).place[0]
        obstacles = [(place, 0.5, OBSTACLE) for place in places]
        return paint_discs(picture, grid, [*obstacles, (car[:2], 0.8, CAR), (nose, 0.3, NOSE)])

    def describe(self, row: int = 0) -> str:
        station, offset, _, legal = self.place[row].tolist()
        side = "left" if offset > 0 else "right"
        return (
            f"The car is at metre {station:.0f} of {self.config.length}, {abs(offset):.1f} m "
            f"{side} of the route, at {float(self.car[row, 3]):.1f} m/s; its score is {legal:.0f}."
        )


def _uncomfortable(before: Tensor, now: Tensor) -> Tensor:
    """The exceeded limits of a comfortable ride [n, 6] (bool): m/s^2, m/s^3, rad/s, rad/s^2."""
    a = now[:, 4]
    old = before[:, 4]
    rate = now[:, 5]
    old_rate = before[:, 5]
    lateral = now[:, 3] * rate
    old_lateral = before[:, 3] * old_rate
    jerk = (a - old) / DT
    total = (jerk.square() + ((lateral - old_lateral) / DT).square()).sqrt()
    limits = [(a > 2.40) | (a < -4.05), lateral.abs() > 4.89, total > 8.37, jerk.abs() > 4.13]
    limits += [rate.abs() > 0.95, (rate - old_rate).abs() / DT > 1.93]
    return torch.stack(limits, 1)
