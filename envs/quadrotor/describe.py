"""Text description of a quadrotor's state."""

from __future__ import annotations

import torch
from torch import Tensor


def described(state: Tensor, seconds: float) -> str:
    """One column [17] of a state, `seconds` after the start."""
    x, y, z = state[:3].tolist()
    upright = 1 - 2 * state[4:6].square().sum().clamp(0, 1)
    speeds = " ".join(f"{100 * speed:.0f}" for speed in state[13:].tolist())
    return (
        f"The quadrotor is {state[:3].norm():.2f} m from the target, at ({x:.2f}, {y:.2f}, "
        f"{z:.2f}) m, tilted {torch.rad2deg(upright.acos()):.0f} degrees, moves "
        f"{state[7:10].norm():.2f} m/s, {going(float(state[9]))}, and turns "
        f"{state[10:13].norm():.1f} rad/s; rotors at {speeds} % of their highest speed; "
        f"{seconds:.2f} s in the air."
    )


def going(climb: float) -> str:
    """The word for a vertical velocity (m/s)."""
    return "climbing" if climb > 0.05 else "sinking" if climb < -0.05 else "level"
