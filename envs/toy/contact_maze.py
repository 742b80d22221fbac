"""ContactMaze: variable-impedance control of a tool around two walls, with random pushes.

    force = K (x_d - x) - 2 zeta sqrt(K m) v + contact + push        (zeta 1, m the tool's mass)

The action moves the set-point x_d and sets the stiffness K; both are held for a control tick of 20
ms with ten physics steps. Walls are stiff damped springs: light contact is allowed; a contact force
above the limit is a violation and ends the episode. Random pushes act on the tool at any tick, also
between two decisions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, NonNegative, Positive
from embodied.core.env import StateRoles, Step
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv, Generators, paint, paint_discs, pixel_grid

DT = 0.02
SUBSTEPS = 10
SIDE = 0.6  # m
RADIUS = 0.02  # m
MASS = 2.0  # kg
SPEED = 0.4  # of the set-point, m/s
STRETCH = 0.05  # how far it may be from the tool, m
SOFT = 100.0  # N/m
STIFF = 1000.0  # N/m
WALL = 10_000.0  # N/m of a wall's skin
DAMPED = 60.0  # N s/m of a wall's skin
THICK = 0.2
UPPER = (0.2, 0.36)  # round the end of the first wall
LOWER = (0.4, 0.24)  # round the end of the second wall
GOAL = (0.52, 0.3)
NEAR = 0.04
PUSHES = 3  # in an episode
LASTS = 6  # ticks of a push
REACHED = 5.0  # what success pays
LATE = 0.02  # what a tick costs
NAMES = ("x", "y", "vx", "vy", "fx", "fy", "ex", "ey")


@dataclass(frozen=True)
class Config:
    """Settings of the maze with contacts."""

    num_envs: Count = 16  # parallel environments
    horizon: Count = 250  # ticks of an episode
    limit: Positive = 30.0  # contact force that is a violation, N
    push: NonNegative = 15.0  # largest random push, N (0: none)
    seed: CountOrZero = 0  # of the random numbers


class ContactMaze(BatchedEnv):
    """Observation `state`: position, velocity, contact force of the last tick, set-point minus
    position. Action: set-point velocity (1: 0.4 m/s) and stiffness (-1 soft, 1 stiff). The log has
    `violated` and `force`, the largest contact force of the tick (N).
    """

    name = "contact_maze"
    kept: ClassVar = {
        **{key: key for key in ("velocity", "force", "age", "when", "push")},
        **{"place": "places", "setpoint": "setpoints", "generator": "streams.state"},
    }

    stiffest = STIFF
    damped = 2 * math.sqrt(STIFF * MASS)
    """N/m and N s/m; softer springs have the damping of the same ratio."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_envs = config.num_envs
        self.spec = Spec(
            {"state": Leaf((8,), names=NAMES)},
            Leaf((3,), low=-1.0, high=1.0, names=("x", "y", "stiffness")),
            dt=DT,
            text="go round both walls to the goal, and do not hit anything hard",
        )
        # Low and high corners [W, 2, 2]: two walls, four borders.
        far = SIDE + THICK
        self.boxes = torch.tensor(
            [
                [[0.19, -THICK], [0.21, UPPER[1] - 0.04]],
                [[0.39, LOWER[1] + 0.04], [0.41, far]],
                [[-THICK, -THICK], [0.0, far]],
                [[SIDE, -THICK], [far, far]],
                [[-THICK, -THICK], [far, 0.0]],
                [[-THICK, SIDE], [far, far]],
            ]
        )
        n = self.num_envs
        self.streams = Generators(config.seed, n)
        self.places, self.setpoints, self.velocity, self.force = torch.zeros(4, n, 2).unbind()
        self.age = torch.zeros(n, dtype=torch.int64)
        self.when = torch.zeros(n, PUSHES, dtype=torch.int64)
        self.push = torch.zeros(n, PUSHES, 2)
        every = torch.arange(n)
        self.begin(every)
        self.obs = self.observe(every)

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        """A start left of the first wall, and all pushes of the episode to come."""
        self.velocity[rows] = 0.0
        self.force[rows] = 0.0
        self.age[rows] = 0
        for row in rows.tolist():
            lots = self.streams.uniform(2 + 3 * PUSHES, row)
            place = torch.tensor([0.06, 0.08]) + lots[:2] * torch.tensor([0.07, 0.2])
            self.places[row] = self.setpoints[row] = place
            when, turn, strength = lots[2:].view(3, PUSHES)
            self.when[row] = (when * self.config.horizon).long()
            aim = torch.stack([(math.tau * turn).cos(), (math.tau * turn).sin()], 1)
            self.push[row] = aim * ((0.5 + 0.5 * strength) * self.config.push)[:, None]

    def observe(self, rows: Tensor) -> Tensors:
        parts = (self.places, self.velocity, self.force, self.setpoints - self.places)
        return {"state": torch.cat(parts, 1)[rows]}

    def step(self, action: Tensor) -> Step:
        before = distance(self.places)
        peak = self._move(action.clamp(-1, 1))
        self.age = self.age + 1
        following = self.observe(torch.arange(self.num_envs))
        violated = peak > self.config.limit
        won = ((self.places - torch.tensor(GOAL)).norm(dim=1) < NEAR) & ~violated
        late = (self.age >= self.config.horizon) & ~won & ~violated
        reward = 10 * (before - distance(self.places)) + REACHED * won - LATE
        log = {"success": won, "violated": violated, "force": peak}
        return self.finish(following, reward, won | violated, late, log)

    def impedance(self, action: Tensor) -> tuple[Tensor, Tensor]:
        action = action.clamp(-1, 1)
        stretch = self.setpoints + SPEED * DT * action[..., :2] - self.places
        long = stretch.norm(dim=-1, keepdim=True).clamp(min=STRETCH)
        stiffness = stiffness_of(action[..., 2:])
        return self.places + stretch * (STRETCH / long), stiffness.expand_as(stretch)

    def scaled(self, action: Tensor, share: Tensor, stiffness: Tensor) -> Tensor:
        stiff = 2 * (stiffness[..., :1] / SOFT).log() / math.log(STIFF / SOFT) - 1
        return torch.cat([action[..., :2].clamp(-1, 1) * share[..., None], stiff], -1)

    def _move(self, action: Tensor) -> Tensor:
        """One tick; the largest contact force [n] in it."""
        goal, stiffness = self.impedance(action)
        damping = 2 * (stiffness * MASS).sqrt()
        since = self.age[:, None] - self.when
        hand = (self.push * ((since >= 0) & (since < LASTS))[:, :, None]).sum(1)
        x = self.places
        v = self.velocity
        dt = DT / SUBSTEPS
        peak = torch.zeros(len(x))
        mean = torch.zeros_like(x)
        for _ in range(SUBSTEPS):
            force = contact(x, v, self.boxes)
            peak = torch.maximum(peak, force.norm(dim=1))
            mean = mean + force / SUBSTEPS
            v = v + (stiffness * (goal - x) - damping * v + force + hand) * (dt / MASS)
            x = x + v * dt
        self.places = x
        self.velocity = v
        self.force = mean
        self.setpoints = goal
        return peak

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"age": None}, {"generator": None}, {"when": None})

    def render(self, row: int = 0, width: int = 320, height: int = 320) -> Tensor:
        """A map: walls dark, goal green, set-point grey, the tool blue, red where it touches."""
        edge = (-0.02, SIDE + 0.02)
        grid = pixel_grid(width, height, edge, edge)
        picture = torch.full((height, width, 3), 235, dtype=torch.uint8)
        paint(picture, inside(grid, self.boxes), (70, 75, 85))
        touches = bool(self.force[row].norm() > 0)
        discs = [
            (torch.tensor(GOAL), NEAR, (80, 170, 100)),
            (self.places[row], RADIUS, (200, 60, 50) if touches else (60, 100, 190)),
            (self.setpoints[row], 0.006, (150, 150, 150)),
        ]
        return paint_discs(picture, grid, discs)

    def describe(self, row: int = 0) -> str:
        x, y = self.places[row].tolist()
        force = self.force[row].norm().item()
        return (
            f"The tool is at ({x:.2f}, {y:.2f}) m, walls push it with {force:.0f} N "
            f"(at most {self.config.limit:.0f}); the goal is at {GOAL}."
        )


def stiffness_of(action: Tensor) -> Tensor:
    """N/m of an action in [-1, 1], from soft to stiff in equal ratios."""
    return SOFT * (STIFF / SOFT) ** (0.5 * (action + 1))


def contact(x: Tensor, v: Tensor, boxes: Tensor) -> Tensor:
    """The walls' force [n, 2] (N) on discs at `x` [n, 2] (m) that move at `v` [n, 2] (m/s)."""
    away = x[:, None] - x[:, None].clamp(boxes[:, 0], boxes[:, 1])
    far = away.norm(dim=2, keepdim=True)
    normal = away / far.clamp(min=1e-9)
    deep = RADIUS - far
    closing = -(v[:, None] * normal).sum(2, keepdim=True)
    # Skin never pulls.
    push = (WALL * deep + DAMPED * closing).clamp(min=0) * (deep > 0)
    return (push * normal).sum(1)


def distance(x: Tensor) -> Tensor:
    """Metres [n] from places [n, 2] to the goal, round the ends of the walls that are before it."""
    upper = torch.tensor(UPPER)
    lower = torch.tensor(LOWER)
    goal = torch.tensor(GOAL)
    second = (x - lower).norm(dim=1) + (lower - goal).norm()
    first = (x - upper).norm(dim=1) + (upper - lower).norm() + (lower - goal).norm()
    behind = torch.where(x[:, 0] < LOWER[0], second, (x - goal).norm(dim=1))
    return torch.where(x[:, 0] < UPPER[0], first, behind)


def inside(place: Tensor, boxes: Tensor) -> Tensor:
    """Whether places [..., 2] are in a wall."""
    within = (place[..., None, :] >= boxes[:, 0]) & (place[..., None, :] <= boxes[:, 1])
    return within.all(-1).any(-1)
