"""StumpTrack: a planar walker on a track of stumps with parameterised height and spacing.

In the manner of the BipedalWalker stump tracks (Portelas et al., 2019; TeachMyAgent, Romac et al.,
2021), in batched MuJoCo. The reward of a step is

    r = d(130 x / 30 - 5 |pitch|) - 0.028 |a|_1        (m, rad)

A fall, or leaving at the back, gives the reward `fall` and ends the episode, as does the end of the
track.
"""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Count, CountOrZero, NonNegative, Number, Positive
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.envs.mujoco.batch_env import Floats, MujocoVecEnv, Outcome, Rows, action_leaf

STEP = 14 / 30
"""One terrain step, m: heights, widths and spacings of stumps count in these."""
SLOTS = 24
"""Stumps that are there at once: those around the walker, and those that it is about to see."""
TALLEST = 10.0
"""In terrain steps; a stump is a box of this height, sunk into the ground but for its own."""
HULL = (32 / 30, 0.35, 8.5 / 30)
THIGH = 4 / 30
SHIN = 3.2 / 30
LEG = 34 / 30
HIP = -8 / 30
STAND = 2 * LEG + 0.15
"""Height of the hull's middle above the ground at a start, m."""
TORQUE = 80.0
SPEEDS = (4.0, 6.0)
JOINTS = ("hip_1", "knee_1", "hip_2", "knee_2")
CONTACTS = ("hull", "shin_1", "shin_2")


def walker() -> str:
    """MJCF of walker, ground and SLOTS stumps (mocap bodies: their places are in the state).

    Sizes, masses, joint limits and motors are those of BipedalWalker (Gymnasium's Box2D
    environment). Its motors hold a speed with a maximum torque; here torque falls with speed as in
    a DC motor,

        torque = 80 a - (80 / w) speed    (N m, w = 4 rad/s at the hips, 6 at the knees)
    """
    legs = "".join(_leg(i, y) for i, y in ((1, -0.2), (2, 0.2)))
    motors = "".join(f'<motor joint="{name}" gear="{TORQUE}"/>' for name in JOINTS)
    touches = "".join(f'<touch name="{name}" site="{name}"/>' for name in CONTACTS)
    return f"""
<mujoco model="stump_track">
  <compiler angle="radian"/>
  <option timestep="0.005" gravity="0 0 -10" iterations="20" ls_iterations="10"/>
  <statistic extent="8" center="0 0 1"/>
  <visual><global offwidth="1280" offheight="960"/><headlight ambient="0.5 0.5 0.5"/></visual>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1=".85 .92 1" rgb2="1 1 1"
      width="64" height="64"/>
    <texture name="grass" type="2d" builtin="checker" rgb1=".47 .66 .37" rgb2=".42 .61 .33"
      width="128" height="128"/>
    <material name="grass" texture="grass" texrepeat="0.5 0.5" texuniform="true"/>
  </asset>
  <default>
    <geom contype="0" conaffinity="1" friction="0.7 0.005 0.0001"/>
    <joint axis="0 -1 0" limited="true" armature="0.02"/>
    <motor ctrlrange="-1 1" ctrllimited="true"/>
    <site group="4" rgba="0 0 0 0"/>
  </default>
  <worldbody>
    <light directional="true" castshadow="false" pos="0 0 20" dir="0.3 0.5 -1"/>
    <geom name="ground" type="plane" size="0 0 1" contype="1" conaffinity="0" material="grass"/>
    {"".join(_stump(slot) for slot in range(SLOTS))}
    <body name="hull" pos="0 0 {STAND}">
      <camera name="side" mode="track" pos="1.5 -8.5 0.2" xyaxes="1 0 0 0 0.08 1"/>
      <joint name="x" type="slide" axis="1 0 0" limited="false" armature="0"/>
      <joint name="z" type="slide" axis="0 0 1" limited="false" armature="0"/>
      <joint name="pitch" type="hinge" limited="false" armature="0"/>
      <geom name="hull" type="box" group="1" size="{HULL[0]} {HULL[1]} {HULL[2]}" mass="5.1"
        rgba=".50 .38 .66 1"/>
      <site name="hull" type="box" size="{HULL[0] + 0.05} {HULL[1] + 0.05} {HULL[2] + 0.05}"/>
      {legs}
    </body>
  </worldbody>
  <actuator>{motors}</actuator>
  <sensor>{touches}</sensor>
</mujoco>"""


def _stump(slot: int) -> str:
    half = TALLEST * STEP / 2
    return f"""
    <body name="stump_{slot}" mocap="true" pos="{1000 + 2 * slot} 0 0">
      <geom type="box" size="{STEP / 2} 1 {half}" contype="1" conaffinity="0" rgba=".45 .36 .28 1"/>
    </body>"""


def _leg(number: int, y: float) -> str:
    shade = ".60 .47 .76 1" if number == 1 else ".40 .30 .54 1"
    hip, knee = (TORQUE / speed for speed in SPEEDS)
    return f"""
      <body name="thigh_{number}" pos="0 {y} {HIP}">
        <joint name="hip_{number}" range="-0.8 1.1" damping="{hip}"/>
        <geom type="capsule" group="1" fromto="0 0 0 0 0 {-LEG}" size="{THIGH}" mass="0.30"
          rgba="{shade}"/>
        <body name="shin_{number}" pos="0 0 {-LEG}">
          <joint name="knee_{number}" range="-1.6 -0.1" damping="{knee}"/>
          <geom type="capsule" group="1" fromto="0 0 0 0 0 {-LEG + SHIN}" size="{SHIN}" mass="0.24"
            rgba="{shade}"/>
          <site name="shin_{number}" type="capsule" fromto="0 0 0 0 0 {-LEG + SHIN}"
            size="{SHIN + 0.05}"/>
        </body>
      </body>"""


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
            mujoco.MjModel.from_xml_string(walker()),
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
        # Angles and speeds in turn, [n, 4, 2]: knees count from one radian of flexion.
        angles = qpos[:, 3:] + np.array([0, 1, 0, 1.0])
        joints = np.stack([angles, qvel[:, 3:] / np.array([*SPEEDS, *SPEEDS])], 2)
        parts = [
            qpos[:, 2:3],
            2 / 50 * qvel[:, 2:3],
            qvel[:, 0:1] * (0.3 * 20 / 50),
            qvel[:, 1:2] * (0.3 * 13.33 / 50),
            joints.reshape(len(angles), -1),
            touch[rows, 1:] > 0,
            self.beams(rows),
        ]
        return {"state": np.concatenate(parts, axis=1, dtype=np.float32)}

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
