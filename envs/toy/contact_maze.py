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

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, NonNegative, Positive
from embodied.core.env import StateRoles, Step, VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors

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


class ContactMaze(VecEnv):
    """Observation `state`: position, velocity, contact force of the last tick, set-point minus
    position. Action: set-point velocity (1: 0.4 m/s) and stiffness (-1 soft, 1 stiff). The log has
    `violated` and `force`, the largest contact force of the tick (N).
    """

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
        self.generators = [torch.Generator() for _ in range(self.num_envs)]
        zeros = torch.zeros(self.num_envs, 2)
        self.rows: Tensors = {
            **{name: zeros.clone() for name in ("place", "velocity", "force", "setpoint")},
            "age": torch.zeros(self.num_envs, dtype=torch.int64),
            "when": torch.zeros(self.num_envs, PUSHES, dtype=torch.int64),
            "push": torch.zeros(self.num_envs, PUSHES, 2),
        }
        every = torch.ones(self.num_envs, dtype=torch.bool)
        self._seed(config.seed, every)
        self._begin(every)

    def _seed(self, seed: int, mask: Tensor) -> None:
        for row in mask.nonzero().flatten().tolist():
            self.generators[row].manual_seed(seed * 1_000_003 + row)

    def _begin(self, mask: Tensor) -> None:
        """A start left of the first wall, and all pushes of the episode to come."""
        rows = self.rows
        for row in mask.nonzero().flatten().tolist():
            lots = torch.rand(2 + 3 * PUSHES, generator=self.generators[row])
            place = torch.tensor([0.06, 0.08]) + lots[:2] * torch.tensor([0.07, 0.2])
            rows["place"][row] = rows["setpoint"][row] = place
            rows["velocity"][row] = rows["force"][row] = 0.0
            rows["age"][row] = 0
            when, turn, strength = lots[2:].view(3, PUSHES)
            rows["when"][row] = (when * self.config.horizon).long()
            aim = torch.stack([(math.tau * turn).cos(), (math.tau * turn).sin()], 1)
            rows["push"][row] = aim * ((0.5 + 0.5 * strength) * self.config.push)[:, None]

    def _obs(self) -> Tensors:
        rows = self.rows
        parts = (rows["place"], rows["velocity"], rows["force"], rows["setpoint"] - rows["place"])
        return {"state": torch.cat(parts, 1)}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        rows = torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask
        if seed is not None:
            self._seed(seed, rows)
        self._begin(rows)
        return self._obs()

    def step(self, action: Tensor) -> Step:
        rows = self.rows
        before = distance(self.rows["place"])
        peak = self._move(action.clamp(-1, 1))
        rows["age"] = rows["age"] + 1
        following = self._obs()
        violated = peak > self.config.limit
        won = ((rows["place"] - torch.tensor(GOAL)).norm(dim=1) < NEAR) & ~violated
        late = (rows["age"] >= self.config.horizon) & ~won & ~violated
        reward = 10 * (before - distance(rows["place"])) + REACHED * won - LATE
        ended = won | violated | late
        log = {"success": won, "violated": violated, "force": peak}
        if not ended.any():
            return Step(following, following, reward, won | violated, late, log)
        self._notify_before_reset(ended)
        self._begin(ended)
        return Step(self._obs(), following, reward, won | violated, late, log)

    stiffest = STIFF
    damped = 2 * math.sqrt(STIFF * MASS)
    """N/m and N s/m; softer springs have the damping of the same ratio."""

    @property
    def places(self) -> Tensor:
        return self.rows["place"]

    @property
    def setpoints(self) -> Tensor:
        return self.rows["setpoint"]

    def impedance(self, action: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.rows
        action = action.clamp(-1, 1)
        stretch = rows["setpoint"] + SPEED * DT * action[..., :2] - rows["place"]
        long = stretch.norm(dim=-1, keepdim=True).clamp(min=STRETCH)
        stiffness = stiffness_of(action[..., 2:])
        return rows["place"] + stretch * (STRETCH / long), stiffness.expand_as(stretch)

    def scaled(self, action: Tensor, share: Tensor, stiffness: Tensor) -> Tensor:
        stiff = 2 * (stiffness[..., :1] / SOFT).log() / math.log(STIFF / SOFT) - 1
        return torch.cat([action[..., :2].clamp(-1, 1) * share[..., None], stiff], -1)

    def _move(self, action: Tensor) -> Tensor:
        """One tick; the largest contact force [n] in it."""
        rows = self.rows
        goal, stiffness = self.impedance(action)
        damping = 2 * (stiffness * MASS).sqrt()
        since = rows["age"][:, None] - rows["when"]
        hand = (rows["push"] * ((since >= 0) & (since < LASTS))[:, :, None]).sum(1)
        x = rows["place"]
        v = rows["velocity"]
        dt = DT / SUBSTEPS
        peak = torch.zeros(len(x))
        mean = torch.zeros_like(x)
        for _ in range(SUBSTEPS):
            force = contact(x, v, self.boxes)
            peak = torch.maximum(peak, force.norm(dim=1))
            mean = mean + force / SUBSTEPS
            v = v + (stiffness * (goal - x) - damping * v + force + hand) * (dt / MASS)
            x = x + v * dt
        rows |= {"place": x, "velocity": v, "force": mean, "setpoint": goal}
        return peak

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"age": None}, {"generator": None}, {"when": None})

    def get_state(self) -> Tensors:
        words = torch.stack([generator.get_state() for generator in self.generators])
        return {**{key: value.clone() for key, value in self.rows.items()}, "generator": words}

    def set_state(self, state: Tensors) -> Tensors:
        self.rows = {key: state[key].clone() for key in self.rows}
        for generator, words in zip(self.generators, state["generator"], strict=True):
            generator.set_state(words.clone())
        return self._obs()

    def render(self, row: int = 0, width: int = 320, height: int = 320) -> Tensor:
        """A map: walls dark, goal green, set-point grey, the tool blue, red where it touches."""
        y, x = torch.meshgrid(
            torch.linspace(SIDE + 0.02, -0.02, height),
            torch.linspace(-0.02, SIDE + 0.02, width),
            indexing="ij",
        )
        grid = torch.stack([x, y], 2)
        picture = torch.full((height, width, 3), 235, dtype=torch.uint8)
        picture[inside(grid, self.boxes)] = torch.tensor([70, 75, 85], dtype=torch.uint8)
        touches = bool(self.rows["force"][row].norm() > 0)
        for place, radius, colour in (
            (torch.tensor(GOAL), NEAR, [80, 170, 100]),
            (self.rows["place"][row], RADIUS, [200, 60, 50] if touches else [60, 100, 190]),
            (self.rows["setpoint"][row], 0.006, [150, 150, 150]),
        ):
            disc = (grid - place).norm(dim=2) < radius
            picture[disc] = torch.tensor(colour, dtype=torch.uint8)
        return picture

    def describe(self, row: int = 0) -> str:
        x, y = self.rows["place"][row].tolist()
        force = self.rows["force"][row].norm().item()
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
