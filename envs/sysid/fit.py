"""System identification of arm joints: gains, friction, armature and delay by least squares.

Multiple shooting (Bock, 1983): short windows, each simulated from the measured state. Optimised by
Levenberg-Marquardt (1963) with finite differences that are simulated in one batch. In [0, 1]^P
between the bounds, with initial value x0, K samples per window and the variance 1/12 of a uniform
prior:

    minimise  sum |q_sim(x) - q|^2 / (K s^2) + 12 |x - x0|^2,     cov = (J'J / (K s^2) + 12 I)^-1

s is the measurement noise, or the residual where that is larger. Errors within a window are
correlated, so each window counts once. Where `cov` keeps most of the prior's width, the recording
does not determine the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embodied.core.bounds import Count, Positive
from embodied.core.build import ConfigError
from embodied.envs.fr3 import joint_model
from embodied.envs.sysid.simulate import BOUNDS, Replay
from embodied.envs.sysid.traces import Floats, Trace, Window, cut

PRIOR = 12.0  # 1 / variance of a uniform number in [0, 1]
STEP = 0.01  # of the differences, in the bounds' width
KNOWN = 1 / 3  # of the prior's deviation: what is left of it where a value is determined


@dataclass(frozen=True)
class Config:
    """Settings of the identification."""

    window: Positive = 0.3  # length of a window, s
    most: Count = 24  # most windows for fitting, and again for validation
    noise: Positive = 1e-4  # measurement noise, rad
    rounds: Count = 20  # steps of the optimizer
    threads: Count = 2  # CPU threads


@dataclass(frozen=True)
class Identified:
    """`value`, `deviation` and `known` of each quantity [7] (delay: [1], s), in its own unit;
    `before` and `after`: root mean square errors [7] (rad) in the windows that were held out, with
    the simulation as it was and as fitted. `example`: positions [N, 7] there, measured and both."""

    value: dict[str, Floats]
    deviation: dict[str, Floats]
    known: dict[str, np.ndarray]
    before: Floats
    after: Floats
    windows: int
    example: tuple[Floats, Floats, Floats]

    @property
    def arm(self) -> dict[str, list[float]]:
        """The result in the format of `embodied.envs.fr3.joint_model.write`."""
        return {name: self.value[name].tolist() for name in joint_model.QUANTITIES}


def identify(config: Config, traces: Sequence[Trace]) -> Identified:
    """Fit to every other window, validate on the rest. ConfigError if there are too few windows."""
    windows = cut(list(traces), config.window, BOUNDS["delay"][1] + 0.01)
    if len(windows) < 4:
        raise ConfigError(
            f"the recording has {len(windows)} windows of {config.window:g} s with motion; at "
            "least 4 are "
            "needed, 20 are better: record more motion"
        )
    fit, held = (_evenly_spread(windows[first::2], config.most) for first in (0, 1))
    replay = Replay(fit, config.threads)
    x0 = replay.start
    x, jacobian = _descend(replay, x0, config)
    # Where errors stay, everything is less sure.
    weight = 1 / (replay.samples * max(config.noise, replay.rms(x)) ** 2)
    cov = np.linalg.inv(weight * jacobian.T @ jacobian + PRIOR * np.eye(jacobian.shape[1]))
    judge = Replay(held, config.threads)
    errors = judge(np.stack([x0, x]))
    root = [np.sqrt(np.mean(each**2, axis=0)) for each in errors]
    split = replay.split
    deviation = np.sqrt(np.diag(cov))
    value, low, high = (split(replay.native(each)) for each in (x, x - deviation, x + deviation))
    return Identified(
        value,
        {name: (high[name] - low[name]) / 2 for name in value},
        split(deviation < KNOWN / np.sqrt(PRIOR)),
        root[0],
        root[1],
        len(fit),
        judge.example(errors),
    )


def _descend(replay: Replay, x0: Floats, config: Config) -> tuple[Floats, Floats]:
    """The best candidate that was found from `x0`, and the errors' derivatives there [N * 7, P]."""
    x = x0.copy()
    damping = 1e-2
    for _ in range(config.rounds):
        error, jacobian = _differences(replay, x)
        # Unmodelled effects (a contact, a load) must not push values to their bounds.
        s = max(config.noise, float(np.sqrt(np.mean(error**2))))
        weight = 1 / (replay.samples * s**2)
        cost = weight * error @ error + PRIOR * np.sum((x - x0) ** 2)
        slope = weight * jacobian.T @ error + PRIOR * (x - x0)
        matrix = weight * jacobian.T @ jacobian + PRIOR * np.eye(len(x))
        dampings = damping * np.array([0.01, 0.1, 1.0, 10.0, 100.0])
        tries = np.stack([_step(x, slope, matrix, each) for each in dampings])
        errors = replay(tries).reshape(len(tries), -1)
        costs = weight * np.sum(errors**2, 1) + PRIOR * np.sum((tries - x0) ** 2, 1)
        best = int(np.argmin(costs))
        if costs[best] < cost:
            x = tries[best]
            damping = float(np.clip(dampings[best], 1e-6, 1e6))
        if costs[best] > cost * (1 - 1e-3):
            break
    return x, _differences(replay, x)[1]


def _step(x: Floats, slope: Floats, matrix: Floats, damping: float) -> Floats:
    """A step of Levenberg and Marquardt inside the box; values against its wall stay."""
    free = ~((x <= 0) & (slope > 0) | (x >= 1) & (slope < 0))
    own = matrix[np.ix_(free, free)]
    made = x.copy()
    made[free] -= np.linalg.solve(own + damping * np.diag(np.diag(own)), slope[free])
    return made.clip(0, 1)


def _differences(replay: Replay, x: Floats) -> tuple[Floats, Floats]:
    """Errors [N * 7] at `x` and their derivatives [N * 7, P]."""
    steps = np.where(x + STEP > 1, -STEP, STEP)
    errors = replay(np.concatenate([x[None], x + np.diag(steps)])).reshape(len(x) + 1, -1)
    return errors[0], ((errors[1:] - errors[0]) / steps[:, None]).T


def _evenly_spread(windows: list[Window], most: int) -> list[Window]:
    """Return at most `most` of the windows, evenly spread."""
    take = np.linspace(0, len(windows) - 1, min(most, len(windows))).round().astype(int)
    return [windows[i] for i in take]
