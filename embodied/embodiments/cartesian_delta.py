"""CartesianDelta: Cartesian delta action space of the FR3, with joint position targets, batched.

Differential inverse kinematics with damped least squares (Wampler 1986; Nakamura & Hanafusa 1986)
and a null-space term towards the home pose:

    dq = J+ e + (I - J+ J) k (q_home - q),  J+ = J^T (J J^T + damping^2 I)^-1.

The reference pose is an explicit argument and result, so it can be saved. It stays within `lead` of
the measured tool pose, which bounds the contact force.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from embodied.embodiments import fr3
from embodied.embodiments.arrays import Floats, constant, namespace, solve

Reference = dict[str, Floats]


@dataclass(frozen=True)
class Config:
    """`step` m and `turn` rad are what an action of 1 moves the reference in one control step;
    `turning` chooses which rotations the action has; `low` and `high` bound the tool (m)."""

    dt: float = 0.05
    step: float = 0.025
    turn: float = 0.08
    turning: Literal["none", "yaw", "full"] = "none"
    low: tuple[float, float, float] = (0.28, -0.30, 0.01)
    high: tuple[float, float, float] = (0.72, 0.30, 0.50)
    lead: float = 0.04
    lead_turn: float = 0.15
    damping: float = 0.02
    pull: float = 0.1
    iterations: int = 2
    speed: float = 0.8


class CartesianDelta:
    """The action space of an FR3: tool velocity (dx, dy, dz), some turning, and the gripper.

    The last action element is the wanted opening of the hand: -1 closed, 1 open.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        turning = {"none": (), "yaw": ("yaw",), "full": ("roll", "pitch", "yaw")}
        if config.turning not in turning:
            raise ValueError(f"turning={config.turning!r} is invalid; use none, yaw or full")
        self.names: tuple[str, ...] = ("dx", "dy", "dz", *turning[config.turning], "gripper")

    def begin(self, q: Floats, width: Floats) -> Reference:
        """The reference of robots that stand at `q` [B, 7] with hands `width` [B] m open."""
        place, turn, _ = fr3.forward(q)
        copy = namespace(q).asarray
        return {
            "place": place,
            "turn": turn,
            "q": copy(q, copy=True),
            "width": copy(width, copy=True),
        }

    def __call__(
        self, action: Floats, q: Floats, reference: Reference
    ) -> tuple[Floats, Floats, Reference]:
        """Joint targets [B, 7] (rad), hand width target [B] (m) and the moved reference.

        `action` [B, A] in [-1, 1], `q` [B, 7] measured joint angles.
        """
        xp = namespace(q)
        place, turn = self._moved(action, q, reference)
        joints = self._solved(place, turn, reference["q"])
        aim = (action[:, -1] + 1) / 2 * fr3.OPEN
        change = 2 * fr3.FINGER_SPEED * self.config.dt
        width = reference["width"] + xp.clip(aim - reference["width"], -change, change)
        return joints, width, {"place": place, "turn": turn, "q": joints, "width": width}

    def reach(self, place: Floats, start: Floats | None = None, iterations: int = 12) -> Floats:
        """Joint angles [B, 7] that put the tool at `place` [B, 3], pointing down as at home."""
        xp = namespace(place)
        q = xp.tile(constant(fr3.HOME, place), (len(place), 1)) if start is None else start
        turn = xp.broadcast_to(constant(np.diag([1.0, -1.0, -1.0]), place), (len(place), 3, 3))
        for _ in range(iterations):
            q = _within_limits(q + _step(place, turn, q, 0.01, 0.3))
        return q

    def _moved(self, action: Floats, q: Floats, reference: Reference) -> tuple[Floats, Floats]:
        """The reference pose after `action`, inside the box and near the measured pose."""
        config, xp = self.config, namespace(q)
        here, facing, _ = fr3.forward(q)
        place = reference["place"] + config.step * action[:, :3]
        place = here + _shortened(place - here, config.lead)
        place = xp.clip(place, constant(config.low, place), constant(config.high, place))
        if config.turning == "none":
            return place, reference["turn"]
        # A yaw alone is the last of the three rotations.
        unturned = xp.zeros_like(action[:, : 7 - action.shape[1]])
        vector = xp.concatenate([unturned, config.turn * action[:, 3:-1]], 1)
        turn = fr3.rotation(vector) @ reference["turn"]
        ahead = _shortened(fr3.rotation_error(turn, facing), config.lead_turn)
        return place, fr3.rotation(ahead) @ facing

    def _solved(self, place: Floats, turn: Floats, q: Floats) -> Floats:
        """Joint target for a tool pose, within joint and velocity limits of the last target `q`."""
        config, start = self.config, q
        most = constant(config.speed * fr3.VELOCITY * config.dt, q)
        for _ in range(config.iterations):
            q = q + _step(place, turn, q, config.damping, config.pull)
            q = namespace(q).clip(q, start - most, start + most)
        return _within_limits(q)


def _within_limits(q: Floats) -> Floats:
    return namespace(q).clip(q, constant(fr3.LOWER, q), constant(fr3.UPPER, q))


def _step(place: Floats, turn: Floats, q: Floats, damping: float, pull: float) -> Floats:
    """One damped least-squares step [B, 7] from `q` towards the tool pose."""
    here, facing, jacobian = fr3.forward(q)
    xp = namespace(q)
    error = xp.concatenate([place - here, fr3.rotation_error(turn, facing)], 1)
    home = pull * (constant(fr3.HOME, q) - q)
    # J+ (e - J home) + home is J+ e + (I - J+ J) home with one solve.
    rest = error - xp.einsum("bij,bj->bi", jacobian, home)
    square = jacobian @ jacobian.mT + constant(damping**2 * np.eye(6), q)
    solved = solve(square, rest[:, :, None])
    return (jacobian.mT @ solved)[:, :, 0] + home


def _shortened(vector: Floats, longest: float) -> Floats:
    """Vectors [B, 3], scaled down to at most `longest`."""
    xp = namespace(vector)
    length = xp.linalg.norm(vector, axis=1, keepdims=True)
    return vector * xp.clip(longest / xp.clip(length, 1e-12, None), None, 1.0)
