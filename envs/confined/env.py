"""Confined: a box crawls through a planar tunnel between two height maps, waypoint by waypoint.

The planar form of confined-space locomotion (Xu et al., 2024): a planner sees both maps and yields
waypoints, a policy controls the body between them. The body is accelerated in x, z and pitch,

    v' = v + (push a - drag v) dt

and needs no ground. A contact is rough: it stops the body. Reward, all terms a hundredth of the
paper's size:

    r = [goal] + 0.2 [waypoint] + 0.02 clip(v . w / (0.5 |w|), -1, 1) - 0.01 [contact]
        - 0.005 [|v| < 0.05] - 0.0001 |a - a before|^2              (w: from body to waypoint)

A waypoint pays only where the body is nearer to the goal than at all waypoints before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from embodied.core.bounds import Bound, Count, CountOrZero, NonNegative, Positive
from embodied.core.build import ConfigError
from embodied.core.env import StateRoles, Step
from embodied.core.spec import DEMONSTRATOR, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv, paint, paint_discs, pixel_grid
from embodied.envs.confined.planner import lattice, planned, ways
from embodied.envs.confined.tunnel import BEND, HIGH, SIZE, drawn, heights, room
from embodied.envs.row_rng import RowRng

DT = 0.1  # s
PARTS = 4  # of a step, in each of which contacts are checked
PUSH = (2.0, 2.0, 6.0)  # m/s^2, m/s^2 and rad/s^2 of an action of 1
DRAG = 2.0  # 1/s
STEEP = 0.8  # rad, largest pitch
FIRST = 0.45  # m from the start, where pyramids begin
NEAR = 0.08  # m from a waypoint at which it is reached
TURNED = 0.2  # rad, likewise
GOAL = 0.2  # m from the goal of a success
AHEAD = 0.5  # m to the next waypoint on a straight line
CELL = 0.1  # m between places of the height maps that are seen
SEEN = 1.0  # m ahead that they reach
FAST = 0.5  # m/s towards the waypoint, above which nothing more is paid
SLOW = 0.05  # m/s below which the body stalls
PACE = (0.3, 1.0)  # m/s and rad/s of the controller
SETTLE = 0.15  # s, its time constants


@dataclass(frozen=True)
class Config:
    """Settings of the tunnels and of what leads the body through them."""

    waypoints: Literal["planned", "straight", "goal"] = "planned"  # what the body is led by
    replan: Count = 10  # steps after which a waypoint is planned anew
    tolerance: NonNegative = 0.005  # m that planned ways keep from both maps
    pyramids: Count = 8  # on the floor, and as many on the ceiling
    spare: NonNegative = 0.02  # m on all sides of the body on the way that a tunnel leaves free
    distance: tuple[Positive, Positive] = (1.2, 3.2)  # m to the goal at task 0 and 1
    behind: Annotated[float, Bound(0.0, 1.0)] = 0.0  # m behind the body that it sees
    play: bool = False  # show the PD controller's action, for demonstrator=shown; not for training
    horizon: Count = 200  # steps of an episode
    num_envs: Count = 64  # parallel environments
    seed: CountOrZero = 0  # of the random numbers


class Confined(BatchedEnv):
    """Observations: `state` (velocities in m/s and rad/s, pitch, m to the goal, last action),
    `waypoint` (from the body's pose, m and rad), `floor` and `ceiling` (heights above the body's
    middle every 0.1 m up to 1 m ahead; the frame is level and moves with the body). Actions:
    accelerations. The task is the distance of the goal; without a given one it is the farthest. The
    log has `success`, `touched` (a contact) and `clear` (the planner found a way).
    """

    name = "confined"
    kept: ClassVar = {
        **{name: name for name in ("pose", "velocity", "last", "goal", "waypoint", "tunnel")},
        **{"best": "best", "task": "task", "aimed": "aimed", "clear": "clear", "age": "age"},
        **{"field": "field", "stream": "streams.state"},
    }

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_envs = n = config.num_envs
        low, high = config.distance
        if not 2 * GOAL < low <= high:
            raise ConfigError(
                f"confined: distance=[{low:g}, {high:g}] needs {2 * GOAL:g} < low <= high (m)"
            )
        behind = round(config.behind / CELL)
        self.grid = CELL * torch.arange(-behind, round(SEEN / CELL) + 1)
        at = [f"{CELL * cell:.1f}" for cell in range(-behind, round(SEEN / CELL) + 1)]
        names = ("speed", "climb", "pitch_rate", "pitch", "to_go", "last_x", "last_z", "last_pitch")
        obs = {
            "state": Leaf((len(names),), names=names),
            "waypoint": Leaf((3,), names=("ahead", "up", "pitch")),
            "floor": Leaf((len(at),), unit="m", names=tuple(f"floor_{x}" for x in at)),
            "ceiling": Leaf((len(at),), unit="m", names=tuple(f"ceiling_{x}" for x in at)),
        }
        act = Leaf((3,), low=-1.0, high=1.0, names=("x", "z", "pitch"))
        if config.play:
            obs[DEMONSTRATOR] = act
        task = Leaf((1,), low=0.0, high=1.0, names=("distance",))
        self.spec = Spec(obs, act, DT, task, "crawl through the tunnel to the goal")
        self.push = torch.tensor(PUSH)
        self.every = torch.arange(n)
        self.streams = RowRng(config.seed, n)
        self.bends = math.ceil(high / BEND) + 3
        self.pose, self.velocity, self.last = torch.zeros(3, n, 3).unbind()
        self.goal, self.waypoint = torch.zeros(2, n, 3).unbind()
        self.tunnel = torch.zeros(n, 2, config.pyramids, 3)
        self.nodes = lattice(high)
        planned = config.waypoints == "planned"
        self.field = torch.zeros(n, *self.nodes.shape[:3] if planned else (0, 0, 0))
        self.best = torch.zeros(n)
        self.task = torch.ones(n, 1)
        self.aimed = torch.zeros(n, dtype=torch.int64)  # age at which the waypoint was chosen
        self.clear = torch.ones(n, dtype=torch.bool)
        self.age = torch.zeros(n, dtype=torch.int64)

        self.given = False

    def expect_given_tasks(self) -> None:
        """Expect that `reset(task=...)` follows each end of an episode: `step` draws no tunnels."""
        self.given = True

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        if task is None and self.given:
            return
        config = self.config
        count = len(rows)
        self.task[rows] = torch.ones(count, 1) if task is None else task[rows]
        low, high = config.distance
        lots = self.streams.uniform(6 * config.pyramids + self.bends, rows).T
        self.tunnel[rows] = drawn(lots, FIRST, high - FIRST, config.pyramids, config.spare)
        still = torch.zeros(count, 3)
        self.pose[rows] = still + torch.tensor([0.0, HIGH / 2, 0.0])
        self.velocity[rows] = still
        self.last[rows] = still
        goal = still.clone()
        goal[:, 0] = low + (high - low) * self.task[rows, 0]
        floor, ceiling = heights(goal[:, :1], self.tunnel[rows])[..., 0].unbind(1)
        goal[:, 1] = (floor + HIGH - ceiling) / 2
        self.goal[rows] = goal
        if config.waypoints == "planned":
            self.field[rows] = ways(self.nodes, goal, self.tunnel[rows], config.tolerance)
        self.best[rows] = goal[:, 0]
        self.age[rows] = 0
        self.aim(rows)

    def aim(self, rows: Tensor) -> None:
        """Choose new waypoints for `rows` [n]."""
        pose, goal = self.pose[rows], self.goal[rows]
        self.aimed[rows] = self.age[rows]
        if self.config.waypoints == "planned":
            parts = (self.nodes, self.field[rows], pose, self.tunnel[rows])
            target, found = planned(*parts, self.config.tolerance)
            target = torch.where(found[:, None], target, goal)
            near = (goal - target)[:, :2].norm(dim=1) < NEAR
            target = torch.where(near[:, None], goal, target)
            self.clear[rows] = found
        elif self.config.waypoints == "straight":
            way = goal - pose
            target = pose + way * (AHEAD / way[:, :2].norm(dim=1, keepdim=True)).clamp(max=1)
        else:
            target = goal
        self.waypoint[rows] = target

    def observe(self, rows: Tensor) -> Tensors:
        """The maps are level, whatever the pitch is, and begin at the body's middle."""
        pose = self.pose[rows]
        velocity = self.velocity[rows]
        reach = heights(pose[:, :1] + self.grid, self.tunnel[rows])
        away = self.waypoint[rows] - pose
        to_go = self.goal[rows, 0] - pose[:, 0]
        obs = {
            "state": torch.cat([velocity, pose[:, 2:], to_go[:, None], self.last[rows]], 1),
            "waypoint": away,
            "floor": reach[:, 0] - pose[:, 1:2],
            "ceiling": HIGH - reach[:, 1] - pose[:, 1:2],
        }
        if self.config.play:
            obs[DEMONSTRATOR] = self.controlled(away, velocity)
        return obs

    def controlled(self, away: Tensor, velocity: Tensor) -> Tensor:
        """Actions [n, 3] of a PD controller that leads bodies with `velocity` [n, 3] in a straight
        line to what is `away` [n, 3] from them."""
        far = away[:, :2].norm(dim=1, keepdim=True) / PACE[0]
        time = torch.maximum(far, away[:, 2:].abs() / PACE[1]).clamp(min=SETTLE)
        wanted = (away / time - velocity) / SETTLE + DRAG * velocity
        return (wanted / self.push).clamp(-1, 1)

    def step(self, action: Tensor) -> Step:
        action = action.detach().float().clamp(-1, 1)
        touched = self._move(action)
        self.age = self.age + 1
        away = self.waypoint - self.pose
        near = away[:, :2].norm(dim=1)
        reached = (near < NEAR) & (away[:, 2].abs() < TURNED)
        left = (self.goal - self.pose)[:, :2].norm(dim=1)
        won = left < GOAL
        paid = reached & (self.waypoint != self.goal).any(1) & (left < self.best - NEAR)
        self.best = torch.where(paid, left, self.best)
        speed = self.velocity[:, :2]
        towards = (speed * away[:, :2]).sum(1) / near.clamp(min=1e-3)
        reward = 1.0 * won + 0.2 * paid + 0.02 * (towards / FAST).clamp(-1, 1)
        reward = reward - 0.01 * touched - 0.005 * (speed.norm(dim=1) < SLOW)
        reward = reward - 1e-4 * (action - self.last).square().sum(1)
        self.last = action
        late = (self.age >= self.config.horizon) & ~won
        log = {"success": won, "touched": touched, "clear": self.clear.clone()}
        again = (reached | (self.age - self.aimed >= self.config.replan)) & ~won
        self.aim(again.nonzero().flatten())
        return self.finish(self.observe(self.every), reward, won, late, log)

    def _move(self, action: Tensor) -> Tensor:
        """Move the bodies for a step; whether each touched a map [B]. A contact is rough: it stops
        the body, which stays where it is clear."""
        touched = torch.zeros(self.num_envs, dtype=torch.bool)
        part = DT / PARTS
        for _ in range(PARTS):
            velocity = self.velocity + part * (self.push * action - DRAG * self.velocity)
            pose = self.pose + part * velocity
            free = (room(pose[:, None], self.tunnel)[:, 0] > 0) & (pose[:, 2].abs() < STEEP)
            self.pose = torch.where(free[:, None], pose, self.pose)
            self.velocity = torch.where(free[:, None], velocity, 0.0)
            touched = touched | ~free
        return touched

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"age": None}, {"stream": None}, {"aimed": None})

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        """A side view: maps dark, goal green, waypoint orange, body blue."""
        middle = float(self.pose[row, 0]) + 0.3
        grid = pixel_grid(width, height, (middle - 0.9, middle + 0.9), (0.0, 1.0))
        grid[..., 1] = HIGH / 2 + (grid[..., 1] - 0.5) * 1.8 * height / width
        reach = heights(grid[:1, :, 0], self.tunnel[row : row + 1])[0]
        picture = torch.full((height, width, 3), 235, dtype=torch.uint8)
        walls = (grid[..., 1] < reach[0]) | (grid[..., 1] > HIGH - reach[1])
        paint(picture, walls, (70, 75, 85))
        boxes = ((self.waypoint[row], (240, 190, 120)), (self.pose[row], (60, 100, 190)))
        for pose, colour in boxes:
            x, z = (grid - pose[:2]).unbind(2)
            cos, sin = pose[2].cos(), pose[2].sin()
            inside = (x * cos + z * sin).abs() < SIZE[0] / 2
            paint(picture, inside & ((z * cos - x * sin).abs() < SIZE[1] / 2), colour)
        marks = [(self.goal[row, :2], 0.04, (80, 170, 100))]
        marks.append((self.waypoint[row, :2], 0.02, (230, 130, 30)))
        return paint_discs(picture, grid, marks)

    def describe(self, row: int = 0) -> str:
        x, z, pitch = self.pose[row].tolist()
        left = float(self.goal[row, 0]) - x
        return f"The box is at ({x:.1f}, {z:.2f}) m, pitch {pitch:.2f} rad, {left:.1f} m to go."
