"""Inverse kinematics by damped least squares (Wampler 1986; Nakamura & Hanafusa 1986), batched.

    dq = J+ e + (I - J+ J) k (q_home - q),  J+ = J^T (J J^T + damping^2 I)^-1

`follow` takes bounded steps within the joint limits. `descend` tries several dampings (Levenberg
1944) and takes only steps that lead nearer: near a singular pose, or where the pose cannot be
reached, joint positions come to rest near it and do not swing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodied.embodiments.arrays import Floats, constant, namespace, solve
from embodied.embodiments.fr3 import rotation_error
from embodied.embodiments.kinematics.arm import Arm

TRIED = ((1.0, 1.0), (1.0, 0.0), (6.0, 0.0), (36.0, 0.0))  # times the damping, and the pull
THERE = 1e-3  # m: as near as this, steps in the null space may change the error


@dataclass(frozen=True)
class Settings:
    """`damping` (m), `pull` towards the home pose in the null space, `weight` (m/rad): what a
    radian of turn is worth where place and turn cannot both be had, `inside`: whether `follow`
    stays inside the joint limits in every iteration, too."""

    damping: float = 0.02
    pull: float = 0.1
    weight: float = 1.0
    inside: bool = False


def step(arm: Arm, settings: Settings, place: Floats, turn: Floats, q: Floats) -> Floats:
    """One step [B, n] from `q` [B, n] towards tool poses `place` [B, 3], `turn` [B, 3, 3]."""
    error, jacobian = _error(arm, settings, place, turn, q)
    return _damped_step(arm, error, jacobian, q, settings.damping, settings.pull)


def within_limits(arm: Arm, q: Floats) -> Floats:
    """Joint positions [B, n] inside the arm's limits."""
    return namespace(q).clip(q, constant(arm.lower, q), constant(arm.upper, q))


def follow(
    arm: Arm,
    settings: Settings,
    place: Floats,
    turn: Floats,
    q: Floats,
    most: Floats,
    iterations: int,
) -> Floats:
    """Joint positions [B, n] near tool poses, at most `most` [n] from `q` [B, n] and within the
    arm's limits."""
    start = q
    for _ in range(iterations):
        q = q + step(arm, settings, place, turn, q)
        q = namespace(q).clip(q, start - most, start + most)
        q = within_limits(arm, q) if settings.inside else q
    return within_limits(arm, q)


def descend(
    arm: Arm,
    settings: Settings,
    place: Floats,
    turn: Floats,
    q: Floats,
    most: Floats,
    iterations: int,
) -> Floats:
    """As `follow`; a step is taken only where it leads nearer to the pose (error of place and
    weighted turn, m), so that `q` comes to rest at the nearest that it finds."""
    xp = namespace(q)
    start = q
    low, high = constant(arm.lower, q), constant(arm.upper, q)
    for _ in range(iterations):
        error, jacobian = _error(arm, settings, place, turn, q)
        best = q
        least = xp.linalg.norm(error, axis=1)
        there = least < THERE
        for times, pull in TRIED:
            change = (
                q
                - start
                + _damped_step(
                    arm, error, jacobian, q, times * settings.damping, pull * settings.pull
                )
            )
            # Shortened as a whole: its direction is what leads nearer.
            over = xp.amax(xp.abs(change) / most, 1)
            tried = start + change / xp.clip(over, 1.0, None)[:, None]
            tried = xp.clip(tried, low, high)
            left = xp.linalg.norm(_error(arm, settings, place, turn, tried)[0], axis=1)
            better = (left < least) | (there & (left < THERE) & (pull > 0))
            best = xp.where(better[:, None], tried, best)
            least = xp.where(better, left, least)
        q = best
    return q


def _error(
    arm: Arm, settings: Settings, place: Floats, turn: Floats, q: Floats
) -> tuple[Floats, Floats]:
    """Weighted pose error [B, 6] at `q` and the Jacobian [B, 6, n] in its units; [B, 4] and
    [B, 4, n] of an arm whose `turn` is a pitch [B]."""
    here, facing, jacobian = arm.forward(q)
    apart = (turn - facing)[:, None] if facing.ndim == 1 else rotation_error(turn, facing)
    error = namespace(q).concatenate([place - here, apart], 1)
    if settings.weight == 1.0:
        return error, jacobian
    scale = constant([1.0] * 3 + [settings.weight] * apart.shape[1], q)
    return error * scale, jacobian * scale[:, None]


def _damped_step(
    arm: Arm, error: Floats, jacobian: Floats, q: Floats, damping: float, pull: float
) -> Floats:
    """The damped least-squares step [B, n]."""
    home = pull * (constant(arm.home, q) - q)
    # J+ (e - J home) + home is J+ e + (I - J+ J) home with one solve.
    rest = error - namespace(q).einsum("bij,bj->bi", jacobian, home)
    square = jacobian @ jacobian.mT + constant(damping**2 * np.eye(error.shape[1]), q)
    return (jacobian.mT @ solve(square, rest[:, :, None]))[:, :, 0] + home
