"""Bodies: mobile robots of several kinds with a lidar drive to a goal among round obstacles.

All bodies take the same command, velocities ahead, to the left and of turning, and follow it as far
as they can:

    u = clip(command, limits),  v <- v + (u - v) (1 - exp(-dt / lag)),  |turn| <= |ahead| / radius

A bicycle has a turning radius, an omnidirectional body a speed to the left, a tracked one a lag.
Reward, in hundreds: -distance to the goal in each step, 2000 at the goal, -1000 for a collision, as
in COMPASS (Liu et al., 2025), for whose residuals and distillation this is the small environment.

The planner is a dynamic window (Fox et al., 1997) on shortest ways: of a grid of constant commands,
played for 1.5 s on the map, the one that leads to the shortest way and keeps off obstacles.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, max_pool2d

from embodied.core.bounds import Count, CountOrZero
from embodied.core.build import ConfigError
from embodied.core.device import pick_device
from embodied.core.env import StateRoles, Step
from embodied.core.spec import DEMONSTRATOR, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv, paint, paint_discs, pixel_grid, turned_by
from embodied.envs.row_rng import RowRng

DT = 0.1  # s
SIDE = 8.0  # m, of the square room
DISC = (0.3, 0.6)  # m, least and largest radius of an obstacle
NEAR = 0.4  # m, distance from the goal of a success
APART = 4.0  # m, wanted distance of start and goal
CLEAR = 0.8  # m, wanted distance of start and goal from obstacles
TRIES = 16  # places of which the start and the goal are chosen
CELLS = 32  # of the planner's map, per side
RAYS = 24  # of the lidar, evenly all round, the first one ahead
REACH = 4.0  # m, of the lidar
SCALE = (1.0, 1.0, 1.5)  # m/s, m/s and rad/s of an action of 1
WHICH = "privileged/body"  # observation: the number of the body among those of the environment
NAMES = ("ahead", "left", "turn")


@dataclass(frozen=True)
class Body:
    """What a body can do, and how large it is."""

    forward: float = 1.0  # largest speed ahead, m/s
    backward: float = 0.0  # largest speed back, m/s
    sideways: float = 0.0  # largest speed to either side, m/s
    turn: float = 1.5  # largest rate of turning, rad/s
    radius: float = 0.0  # smallest turning radius, m; 0: it turns on the spot
    lag: float = 0.05  # time constant of its velocities, s
    footprint: float = 0.2  # radius of the circle that it fills, m


BODIES = {
    "unicycle": Body(),
    "bicycle": Body(backward=0.5, radius=0.9, lag=0.15, footprint=0.3),
    "omni": Body(forward=0.5, backward=0.5, sideways=0.5, turn=0.6, lag=0.1, footprint=0.4),
    "tracked": Body(forward=0.8, backward=0.4, turn=0.9, lag=0.8, footprint=0.35),
    "forklift": Body(forward=0.7, backward=0.5, turn=0.9, radius=0.5, lag=0.4, footprint=0.35),
}
LIMITS = tuple(Body.__dataclass_fields__)


@dataclass(frozen=True)
class Config:
    """Settings of the bodies and their room."""

    bodies: tuple[str, ...] = ("unicycle", "bicycle", "omni", "tracked")  # one for each episode
    describe: bool = False  # show the limits and the footprint of the body
    play: bool = False  # show the planner's command, for demonstrator=shown; not for training
    obstacles: Count = 10  # round obstacles in the room
    horizon: Count = 200  # steps of an episode
    num_envs: Count = 64  # parallel environments
    device: str = "cpu"  # torch device of the simulation: auto, cpu, cuda:0
    seed: CountOrZero = 0  # of the random numbers


class Bodies(BatchedEnv):
    """Observations: `state` (the goal's direction and distance, the own velocities, the lidar's
    distances in m) and, where `describe`, `body` (its limits) and `privileged/body` (its number).
    """

    name = "bodies"
    kept: ClassVar = {
        **{name: name for name in ("place", "heading", "velocity", "discs", "goal", "age")},
        **{"which": "which", "field": "field", "stream": "streams.state"},
    }

    def __init__(self, config: Config) -> None:
        unknown = [name for name in config.bodies if name not in BODIES]
        if unknown or not config.bodies:
            raise ConfigError(
                f"env.bodies={list(config.bodies)} should be some of {', '.join(BODIES)}"
            )
        self.config = config
        self.num_envs = n = config.num_envs
        self.device = device = pick_device(config.device)
        limits = [astuple(BODIES[name]) for name in config.bodies]
        self.limits = torch.tensor(limits, device=device)
        self.scale = torch.tensor(SCALE, device=device)
        self.angles = torch.arange(RAYS, device=device) * (2 * math.pi / RAYS)
        act = Leaf((3,), low=-1.0, high=1.0, names=NAMES)
        state = ("goal_ahead", "goal_left", "goal_distance", *NAMES)
        names = (*state, *(f"ray{i}" for i in range(RAYS)))
        obs = {"state": Leaf((len(names),), names=names)}
        if config.describe:
            obs["body"] = Leaf((len(LIMITS),), names=LIMITS)
            obs[WHICH] = Leaf((1,), "int64", low=0)
        if config.play:
            obs[DEMONSTRATOR] = act
        self.spec = Spec(obs, act, DT, text="drive to the goal and touch nothing")
        self.every = torch.arange(n, device=device)
        self.streams = RowRng(config.seed, n, device)
        self.place = torch.zeros(n, 2, device=device)
        self.goal = torch.zeros(n, 2, device=device)
        self.heading = torch.zeros(n, device=device)
        self.velocity = torch.zeros(n, 3, device=device)
        self.discs = torch.zeros(n, config.obstacles, 3, device=device)  # x, y, radius
        self.which = torch.zeros(n, dtype=torch.int64, device=device)
        self.age = torch.zeros(n, dtype=torch.int64, device=device)
        cells = CELLS if config.play else 0
        self.field = torch.zeros(n, cells, cells, device=device)  # the planner's map

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        count = self.config.obstacles
        lots = self.streams.uniform(2 + 3 * count + 4 * TRIES, rows).T
        kinds = len(self.limits)
        self.which[rows] = (lots[:, 0] * kinds).long().clamp(max=kinds - 1)
        self.heading[rows] = 2 * math.pi * lots[:, 1]
        discs, tries = lots[:, 2:].tensor_split([3 * count], 1)
        discs = discs.view(-1, count, 3)
        centre = SIDE * discs[..., :2]
        radius = DISC[0] + (DISC[1] - DISC[0]) * discs[..., 2:]
        discs = torch.cat([centre, radius], 2)
        self.discs[rows] = discs
        starts, goals = (SIDE * tries.view(-1, 2, TRIES, 2)).unbind(1)
        # Of equally good ones the first, on every device.
        order = 1e-4 * torch.arange(TRIES, device=self.device)
        start = chosen(starts, clearance(starts, discs).clamp(max=CLEAR) - order)
        far = (goals - start[:, None]).norm(dim=2).clamp(max=APART)
        self.goal[rows] = chosen(goals, clearance(goals, discs).clamp(max=CLEAR) + far - order)
        self.place[rows] = start
        if self.config.play:
            footprint = self.limits[self.which[rows], -1]
            self.field[rows] = distances(self.goal[rows], discs, footprint)
        self.velocity[rows] = 0.0
        self.age[rows] = 0

    def observe(self, rows: Tensor) -> Tensors:
        place = self.place[rows]
        discs = self.discs[rows]
        to_goal = turned_by(self.goal[rows] - place, -self.heading[rows])
        distance = to_goal.norm(dim=1, keepdim=True)
        seen = lidar(place, self.heading[rows, None] + self.angles, discs)
        way = to_goal / distance.clamp(min=1e-6)
        obs = {"state": torch.cat([way, distance, self.velocity[rows], seen], 1)}
        if self.config.describe:
            obs["body"] = self.limits[self.which[rows]]
            obs[WHICH] = self.which[rows, None]
        if self.config.play:
            obs[DEMONSTRATOR] = self.planned(rows)
        return obs

    def step(self, action: Tensor) -> Step:
        limits = self.limits[self.which]
        command = self.scale * action.detach().to(self.device, torch.float32).clamp(-1, 1)
        self.velocity = followed(self.velocity, command, limits)
        # The mean heading of the step.
        way = self.heading + 0.5 * DT * self.velocity[:, 2]
        self.place = self.place + DT * turned_by(self.velocity[:, :2], way)
        self.heading = self.heading + DT * self.velocity[:, 2]
        self.age = self.age + 1
        distance = (self.goal - self.place).norm(dim=1)
        hit = clearance(self.place[:, None], self.discs)[:, 0] < limits[:, -1]
        won = (distance < NEAR) & ~hit
        late = (self.age >= self.config.horizon) & ~won & ~hit
        reward = 20.0 * won - 10.0 * hit - distance / 100
        log = {"success": won, "collided": hit}
        return self.finish(self.observe(self.every), reward, won | hit, late, log)

    def planned(self, rows: Tensor) -> Tensor:
        """The planner's actions [n, 3] for `rows` [n], by the map and the limits of the body."""
        limits = self.limits[self.which[rows]]
        speeds = torch.linspace(0, 1, 5, device=self.device)
        turns = torch.linspace(-1, 1, 15, device=self.device)
        ahead, turn = torch.cartesian_prod(speeds, turns).unbind(1)
        ahead = ahead * limits[:, :1]  # [n, commands]
        turn = turn * limits[:, 3:4]
        place = self.place[rows, None].expand(-1, ahead.shape[1], -1)
        heading = self.heading[rows, None].expand_as(ahead)
        room = torch.full_like(ahead, CLEAR)
        nearest = torch.ones_like(ahead)  # m
        for _ in range(6):
            way = heading + 0.125 * turn
            place = place + turned_by(torch.stack([0.25 * ahead, 0 * ahead], -1), way)
            heading = heading + 0.25 * turn
            room = torch.minimum(room, clearance(place, self.discs[rows]) - limits[:, -1:])
            nearest = torch.minimum(nearest, (self.goal[rows, None] - place).norm(dim=2))
        at = place + 0.4 * directions(heading)  # it has to face its way, too
        at = 2 * at[:, None] / SIDE - 1
        far = grid_sample(self.field[rows, None], at, padding_mode="border", align_corners=False)
        cost = far[:, 0, 0] + 2 * nearest + 3 * (0.3 - room).clamp(min=0)
        best = (cost + 100 * (room < 0.05)).argmin(1, keepdim=True)
        command = torch.cat([ahead.gather(1, best), 0 * best, turn.gather(1, best)], 1)
        return command / self.scale

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"age": None}, {"stream": None})

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        """A map: obstacles dark, the goal green, the body blue, what the lidar hits orange."""
        edge = (-0.2, SIDE + 0.2)
        grid = pixel_grid(width, height, edge, edge)
        grid[..., 0] = SIDE / 2 + (grid[..., 0] - SIDE / 2) * width / height  # discs stay round
        picture = torch.full((height, width, 3), 235, dtype=torch.uint8)
        place, heading = self.place[row].cpu(), self.heading[row].cpu()
        discs = self.discs[row].cpu()
        paint(picture, clearance(grid, discs.expand(height, -1, -1)) < 0, (70, 75, 85))
        angles = heading + self.angles.cpu()
        seen = lidar(place[None], angles[None], discs[None])[0]
        hits = place + seen[:, None] * directions(angles)
        size = float(self.limits[self.which[row], -1])
        marks = [(self.goal[row].cpu(), NEAR, (80, 170, 100)), (place, size, (60, 100, 190))]
        marks.append((place + 0.7 * size * directions(heading), 0.3 * size, (20, 40, 90)))
        marks += [(hit, 0.06, (230, 130, 30)) for hit in hits[seen < REACH]]
        return paint_discs(picture, grid, marks)

    def describe(self, row: int = 0) -> str:
        x, y = self.place[row].tolist()
        goal = ", ".join(f"{value:.1f}" for value in self.goal[row].tolist())
        name = self.config.bodies[int(self.which[row])]
        return f"{name} at ({x:.1f}, {y:.1f}) m, goal ({goal}), step {int(self.age[row])}"


def followed(velocity: Tensor, command: Tensor, limits: Tensor) -> Tensor:
    """The velocities [n, 3] one step after `velocity`, of bodies with `limits` [n, 7]."""
    forward, backward, sideways, turn, radius, lag, _ = limits.unbind(1)
    high = torch.stack([forward, sideways, turn], 1)
    low = torch.stack([-backward, -sideways, -turn], 1)
    wanted = torch.minimum(torch.maximum(command, low), high)
    velocity = velocity + (wanted - velocity) * (1 - torch.exp(-DT / lag))[:, None]
    most = torch.where(radius > 0, velocity[:, 0].abs() / radius.clamp(min=1e-6), torch.inf)
    turning = torch.minimum(torch.maximum(velocity[:, 2], -most), most)
    return torch.cat([velocity[:, :2], turning[:, None]], 1)


def clearance(place: Tensor, discs: Tensor) -> Tensor:
    """Distances [n, k] (m) of places [n, k, 2] from the nearest obstacle of `discs` [n, m, 3] or
    wall; negative inside."""
    gap = (place[:, :, None] - discs[:, None, :, :2]).norm(dim=3) - discs[:, None, :, 2]
    wall = torch.minimum(place, SIDE - place).amin(2)
    return torch.minimum(gap.amin(2), wall)


def distances(goal: Tensor, discs: Tensor, footprint: Tensor) -> Tensor:
    """Lengths [n, y, x] (m) of the shortest ways to goals [n, 2] on a grid with diagonals, for
    bodies of radius `footprint` [n]; cells too near to obstacles cost five times as much."""
    middle = (torch.arange(CELLS, device=goal.device) + 0.5) * (SIDE / CELLS)
    cells = torch.stack(torch.meshgrid(middle, middle, indexing="xy"), 2).flatten(0, 1)
    near = clearance(cells.expand(len(goal), -1, -1), discs) < footprint[:, None] + 0.1
    step = (SIDE / CELLS) * (1 + 4 * near.float()).view(-1, CELLS, CELLS)
    gap = (cells - goal[:, None]).norm(dim=2).view(-1, CELLS, CELLS)
    field = torch.where(gap < SIDE / CELLS, gap, 100.0)
    for _ in range(2 * CELLS):
        beside = torch.maximum(
            max_pool2d(-field, (1, 3), 1, (0, 1)), max_pool2d(-field, (3, 1), 1, (1, 0))
        )
        across = max_pool2d(-field, 3, 1, 1)
        field = torch.minimum(field, torch.minimum(step - beside, 2**0.5 * step - across))
    return field


def lidar(place: Tensor, angles: Tensor, discs: Tensor) -> Tensor:
    """Distances [n, k] (m, at most REACH) from places [n, 2] to the first disc or wall along the
    directions `angles` [n, k] (rad)."""
    way = directions(angles)
    offset = discs[:, :, :2] - place[:, None]
    along = torch.einsum("nkd,nmd->nkm", way, offset)
    beside = offset.square().sum(2)[:, None] - along.square()
    half = discs[:, None, :, 2].square() - beside
    meets = along - half.clamp(min=0).sqrt()
    discs_at = torch.where((half > 0) & (along > 0), meets, REACH).amin(2)
    wall = torch.where(way > 0, SIDE - place[:, None], place[:, None])
    walls_at = (wall / way.abs().clamp(min=1e-6)).amin(2)
    return torch.minimum(discs_at, walls_at).clamp(0, REACH)


def directions(angle: Tensor) -> Tensor:
    """Unit vectors [..., 2] at angles [...] (rad)."""
    return torch.stack([angle.cos(), angle.sin()], -1)


def chosen(places: Tensor, score: Tensor) -> Tensor:
    """Of places [n, k, 2] those of the highest `score` [n, k]: [n, 2]."""
    return places[torch.arange(len(places), device=places.device), score.argmax(1)]
