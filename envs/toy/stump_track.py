"""StumpTrack: a planar walker on a track of stumps with parameterised height and spacing.

In the manner of the BipedalWalker stump tracks (Portelas et al., 2019; TeachMyAgent, Romac et al.,
2021), in batched MuJoCo. The reward of a step is

    r = d(130 x / 30 - 5 |pitch|) - 0.028 |a|_1        (m, rad)

A fall, or leaving at the back, gives the reward `fall` and ends the episode, as does the end of the
track.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Count, CountOrZero, NonNegative, Number, Positive
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.envs.mujoco.batch_env import Floats, MujocoVecEnv, Outcome, Rows, action_leaf
from embodied.envs.toy.stump_scene import (
    JOINTS,
    SLOTS,
    SPEEDS,
    STAND,
    STEP,
    TALLEST,
    compile_walker,
)

BEAMS = 10
RANGE = 160 / 30
PAD = 10 * STEP
"""Flat ground before the first stump, and behind the start, m."""
BEHIND = 3.0
"""How far behind the walker stumps are kept, m: nothing of it reaches there."""
CLOSEST = 0.01
LOWEST = 0.05
UNEVEN = 0.1
"""Least gap, least height, and the deviation of a track's heights, in terrain steps."""
PER_METRE = 130 / 30
MASTERED = 230 / 364
"""A return of 230 on the published track, which pays 364 for its length: success."""
NAMES = (
    *("pitch", "pitch_rate", "vx", "vz"),
    *(f"{joint}{what}" for joint in JOINTS for what in ("", "_speed")),
    *("contact_1", "contact_2"),
    *(f"beam_{i}" for i in range(BEAMS)),
)


@dataclass(frozen=True)
class Config:
    """Settings of the walker's track; a terrain step is 0.47 m. Heights below 0.05 are 0.05.

    Published tracks: distance=84, horizon=2000, fall=-100, height up to 3, or 9 where most is
    unfeasible.
    """

    num_envs: Count = 16  # parallel environments
    distance: Positive = 28.0  # to walk, m
    horizon: Count = 700  # steps of 20 ms of an episode
    fall: Number = -33.0  # reward of a fall
    height: tuple[NonNegative, NonNegative] = (0.0, 3.0)  # of stumps, terrain steps
    spacing: tuple[NonNegative, NonNegative] = (0.0, 6.0)  # of stumps, likewise
    threads: Count = 1  # CPU threads
    seed: CountOrZero = 0  # of the random numbers


class StumpTrack(MujocoVecEnv):
    """B walkers, each on its own track. Success, reported at the end of an episode, is a return
    above `bar` = 230/364 of the return for walking the whole track.
    """

    def __init__(self, config: Config) -> None:
        for name, (low, high) in (("height", config.height), ("spacing", config.spacing)):
            if low > high:
                raise ConfigError(f"env.{name}=[{low:g}, {high:g}] must be [low, high]")
        if config.height[1] + 5 * UNEVEN > TALLEST:
            raise ConfigError(f"env.height must be at most {TALLEST - 5 * UNEVEN:g} terrain steps")
        self.config = config
        self.bar = MASTERED * PER_METRE * config.distance
        self.stumps = int((config.distance + RANGE + BEHIND) / ((1 + CLOSEST) * STEP)) + SLOTS
        angles = 1.5 * np.arange(BEAMS) / BEAMS
        self._beams = np.stack([np.sin(angles), -np.cos(angles)])
        super().__init__(
            compile_walker(),
            Spec(
                obs={"state": Leaf((len(NAMES),), names=NAMES)},
                act=action_leaf(JOINTS),
                dt=0.02,
                task=Leaf((2,), low=0.0, high=1.0, names=("height", "spacing")),
                text="Walk to the end of the track, over the stumps.",
            ),
            config.num_envs,
            substeps=4,
            horizon=config.horizon,
            threads=config.threads,
            seed=config.seed,
            name="stump_track",
        )
        n = config.num_envs
        self.memory = {
            "heights": np.zeros((n, self.stumps)),
            "potential": np.zeros(n),
            "return": np.zeros(n),
        }

    def control(self, action: Floats) -> None:
        self.batch.ctrl[:] = action
        self._raise(np.arange(self.num_envs))

    def observe(self, rows: Rows) -> dict[str, NDArray[np.generic]]:
        qpos = self.batch.qpos[rows]
        qvel = self.batch.qvel[rows]
        touch = self.batch.sensordata
        parts = [
            qpos[:, 2:3],
            2 / 50 * qvel[:, 2:3],
            qvel[:, 0:1] * (0.3 * 20 / 50),
            qvel[:, 1:2] * (0.3 * 13.33 / 50),
            self._joints(qpos[:, 3:], qvel[:, 3:]),
            touch[rows, 1:] > 0,
            self.beams(rows),
        ]
        return {"state": np.concatenate(parts, axis=1, dtype=np.float32)}

    @staticmethod
    def _joints(angle: Floats, speed: Floats) -> Floats:
        """Angles and speeds in turn, [n, 8]: knees count from one radian of flexion."""
        shift = np.array([0, 1, 0, 1.0])
        top = np.array([*SPEEDS, *SPEEDS])
        return np.stack([angle + shift, speed / top], 2).reshape(len(angle), -1)

    def beams(self, rows: Rows) -> Floats:
        """The length of each ray from the hull, from straight down to ahead, [n, BEAMS] as
        shares of RANGE."""
        x, z = self.batch.qpos[rows, 0][:, None], self.batch.qpos[rows, 1][:, None] + STAND
        along, down = self._beams
        reach = np.minimum(np.where(down < 0, -z / np.minimum(down, -1e-9), np.inf), RANGE)
        left, top, _ = self._near(rows)
        # Stumps are convex and rest on the ground: a ray enters through the face or from above.
        left = left[:, None]
        top = top[:, None]
        x = x[..., None]
        z = z[..., None]
        along = along[:, None]
        down = down[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            face = np.where(along > 0, (left - x) / along, np.inf)
            enters = (face >= 0) & (z + face * down <= top)
            above = np.where(down < 0, (top - z) / down, np.inf)
            over = x + above * along
        lands = (above >= 0) & (over >= left) & (over <= left + STEP)
        hit = np.minimum(np.where(enters, face, np.inf), np.where(lands, above, np.inf)).min(2)
        return np.clip(np.minimum(reach, hit), 0, RANGE) / RANGE

    def outcome(self, action: Floats) -> Outcome:
        qpos = self.batch.qpos
        memory = self.memory
        config = self.config
        x = qpos[:, 0]
        potential = self._potential()
        reward = potential - memory["potential"] - 0.00035 * 80 * np.abs(action).sum(1)
        fell = (self.batch.sensordata[:, 0] > 0) | (x < -PAD)
        reward = np.where(fell, config.fall, reward)
        ends = fell | (x > config.distance)
        memory["potential"][:] = potential
        memory["return"] += reward
        over = ends | (self.count >= self.horizon)
        log = {"success": over & (memory["return"] > self.bar), "x": x.astype(np.float32)}
        return Outcome(reward, ends, log)

    def _potential(self) -> Floats:
        return PER_METRE * self.batch.qpos[:, 0] - 5 * np.abs(self.batch.qpos[:, 2])

    def draw(self, generator: np.random.Generator) -> Floats:
        return np.append(generator.standard_normal(self.stumps), generator.uniform(-1, 1, 7))

    def place(self, rows: Rows, draws: Floats) -> None:
        height = self.native(rows)[:, :1]
        heights = np.clip(height + UNEVEN * draws[:, : self.stumps], LOWEST, TALLEST)
        self.memory["heights"][rows] = heights * STEP
        noise = draws[:, self.stumps :]
        self.batch.qpos[rows, 3:] = [0.05, -0.6, -0.05, -0.6] + 0.05 * noise[:, 3:]
        self.batch.qvel[rows, :3] = 0.1 * noise[:, :3]
        self.batch.qpos[rows, 1] = 0
        self.memory["potential"][rows] = self._potential()[rows]
        self.memory["return"][rows] = 0
        self._raise(rows)

    def native(self, rows: Rows) -> Floats:
        """Height and spacing [n, 2] of `rows`, in terrain steps."""
        bounds = np.array([self.config.height, self.config.spacing])
        return bounds[:, 0] + self.task[rows] * (bounds[:, 1] - bounds[:, 0])

    def _near(self, rows: Rows) -> tuple[Floats, Floats, NDArray[np.intp]]:
        """Left edge (m), top (m) and number of the SLOTS stumps around and ahead, [n, SLOTS]."""
        pitch = (1 + np.maximum(self.native(rows)[:, 1:], CLOSEST)) * STEP
        first = np.floor((self.batch.qpos[rows, :1] - BEHIND - PAD) / pitch).astype(np.intp)
        number = np.clip(first, 0, self.stumps - SLOTS) + np.arange(SLOTS)
        top = np.take_along_axis(self.memory["heights"][rows], number, 1)
        return PAD + number * pitch, top, number

    def _raise(self, rows: Rows) -> None:
        """Put the stumps near `rows` in place: number i is always slot i modulo SLOTS."""
        left, top, number = self._near(rows)
        place = np.stack([left + STEP / 2, 0 * left, top - TALLEST * STEP / 2], 2)
        self.batch.mocap_pos[rows[:, None], number % SLOTS] = place

    def describe(self, row: int = 0) -> str:
        height, gap = np.maximum(self.native(np.array([row]))[0], (LOWEST, CLOSEST)) * STEP
        return (
            f"The walker is at {self.batch.qpos[row, 0]:.1f} m of {self.config.distance:g} m; "
            f"stumps are {height:.2f} m high and {gap:.2f} m apart."
        )
