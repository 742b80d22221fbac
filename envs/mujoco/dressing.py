"""Dressing: a gripper pulls a sleeve over an arm; partial point clouds, 27 regions of arm poses.

After Wang, Sun, Erickson and Held, "One Policy to Dress Them All" (2023), on MuJoCo's flex in place
of FleX: a tube of cloth, of whose opening the gripper holds three vertices. With the arm as a line
from the fingertip to the shoulder, s is the arc length at which it passes through the opening:

    r = PAID (phi' - phi) + align + collision - FORCE f,    phi = s up to the elbow, 5 s beyond,
    phi = -|centre of the opening - fingertip| while the line does not pass through the opening once

f is the sum of the normal forces on the arm. A sleeve that lies on the arm or was entered
from behind has no s: the crossings are counted with their sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core.bounds import Count, CountOrZero, NonNegative, Positive
from embodied.core.build import ConfigError
from embodied.core.point_cloud import farthest
from embodied.core.spec import DEMONSTRATOR, Leaf, Spec
from embodied.core.spec import POINTS as CLOUD
from embodied.envs.mujoco.batch_env import MujocoVecEnv, Outcome, Rows, action_leaf

Floats = NDArray[np.float64]
AROUND, ALONG = 12, 7  # vertices of the sleeve; the first AROUND are its opening
WIDE, STEP = 0.075, 0.03  # m: radius of the sleeve, distance of its rings
LENGTHS = (0.28, 0.25, 0.12)  # m: upper arm, forearm, hand
RADII = (0.042, 0.036, 0.030)  # m
ANGLES = ((-0.6, 0.3), (0.1, 1.5), (-0.3, 0.6))  # rad: upper arm up, elbow bent, forearm up
CUTS = 3  # regions per angle
EYE = np.array([0.45, -0.9, 0.55])  # m: the camera; the shoulder is at 0, the arm reaches to x
DT, SUBSTEPS = 0.004, 10
TURN = 0.1  # rad per step, of an action of 1
TILT = 1.0  # rad, the most that the gripper turns about y
BOX = np.array([(-0.2, -0.4, -0.6), (0.9, 0.9, 0.6)])  # m: where the gripper may go
PAID = 10.0  # per m
UPPER = 5.0  # weight of the upper arm
NEAR, FAR = 0.03, 0.075  # m: the opening's middle is well, or badly, centred
CLEAR = 0.015  # m: a gripper nearer to the arm than this collides
WHICH = "privileged/region"  # observation: the number of the region among those of `regions`
CLASSES = 3  # of points: cloth, arm, gripper
NAMES = ("x", "y", "z", "turn_y", "turn_z")
OPENING = slice(0, AROUND)


@dataclass(frozen=True)
class Config:
    """Settings of the dressing environment."""

    regions: tuple[CountOrZero, ...] = tuple(range(CUTS**3))  # 9 up + 3 bent + forearm, each 0..2
    observe: tuple[Literal["points", "full", "state"], ...] = ("points",)  # full: nothing is hidden
    points: Count = 96  # points of a cloud
    play: bool = False  # show the path along the arm, for demonstrator=shown; not for training
    stride: Positive = 0.01  # m: of an action of 1, per step of 0.04 s
    force: NonNegative = 0.01  # weight of the force on the arm, per N
    horizon: Count = 150  # steps of an episode
    num_envs: Count = 16  # parallel environments
    threads: Count = 2  # CPU threads
    seed: CountOrZero = 0  # of the random numbers


class Dressing(MujocoVecEnv):
    """Observations by `observe`: `points` and `full` [N, 6] (m from the gripper, one-hot class),
    `state` (joints and opening from the gripper, m); WHICH if there are several regions.
    """

    draws = 3
    portraits = ("camera",)

    def __init__(self, config: Config) -> None:
        if not config.regions or max(config.regions) >= CUTS**3:
            raise ConfigError(f"env.regions={list(config.regions)} should be some of 0..26")
        if not config.observe:
            raise ConfigError("env.observe names what is observed: points, full, state")
        self.config = config
        obs = {"state": Leaf((STATE,))} if "state" in config.observe else {}
        cloud = Leaf((config.points, 3 + CLASSES), unit=CLOUD)
        obs |= {name: cloud for name in ("points", "full") if name in config.observe}
        if len(config.regions) > 1:
            obs[WHICH] = Leaf((1,), "int64", low=0)
        if config.play:
            obs[DEMONSTRATOR] = action_leaf(NAMES)
        task = Leaf((4,), low=0.0, high=1.0, names=("region", "up", "bent", "forearm"))
        spec = Spec(obs, action_leaf(NAMES), DT * SUBSTEPS, task, "Pull the sleeve over the arm.")
        model = mujoco.MjModel.from_xml_string(xml())
        super().__init__(
            model,
            spec,
            config.num_envs,
            substeps=SUBSTEPS,
            horizon=config.horizon,
            threads=config.threads,
            seed=config.seed,
            name="dressing",
        )
        n = config.num_envs
        self.rest = tube()
        self.arm = np.zeros((n, 4, 3))  # shoulder, elbow, wrist, fingertip
        self.turn = np.zeros((n, 2))  # of the gripper about y and z, rad
        self.potential = np.zeros(n)
        self.memory = {"arm": self.arm, "turn": self.turn, "potential": self.potential}
        self.batch.bind("sensordata")

    def place(self, rows: Rows, draws: Floats) -> None:
        count = len(rows)
        region = self.region(rows)
        cuts = np.stack([region // CUTS**2, region // CUTS % CUTS, region % CUTS], 1)
        low, high = np.array(ANGLES).T
        angles = low + (high - low) * (cuts + self.task[rows, 1:]) / CUTS
        joints, quats = posed(angles)
        self.arm[rows] = joints
        self.batch.mocap_pos[rows, :3] = joints[:, :3]
        self.batch.mocap_quat[rows, :3] = quats
        way = joints[:, 3] - joints[:, 2]
        heading = np.arctan2(way[:, 1], way[:, 0])
        ahead = way / LENGTHS[2]
        gripper = joints[:, 3] + 0.04 * ahead + (0, 0, 0.9 * WIDE) + 0.02 * (2 * draws - 1)
        self.turn[rows] = np.stack([np.zeros(count), heading], 1)
        self.move(rows, gripper)
        sleeve = (self.rest - (0, 0, WIDE)) @ rotation(self.turn[rows]).swapaxes(1, 2)
        moved = sleeve + gripper[:, None] - self.rest
        self.batch.qpos[rows] = moved.reshape(count, -1)
        self.potential[rows] = self.measured(rows)[0]

    def region(self, rows: Rows) -> NDArray[np.int64]:
        """The region [n] of the arm poses of `rows`."""
        return np.array(self.config.regions)[self.which(rows)]

    def which(self, rows: Rows) -> NDArray[np.int64]:
        """The number [n] of that region among `config.regions`."""
        count = len(self.config.regions)
        return np.minimum(self.task[rows, 0] * count, count - 1).astype(np.int64)

    def move(self, rows: Rows, gripper: Floats) -> None:
        """Put the grippers of `rows` to `gripper` [n, 3], turned as `turn` says."""
        self.batch.mocap_pos[rows, 3] = gripper.clip(*BOX)
        y, z = 0.5 * self.turn[rows].T
        quat = (np.cos(z) * np.cos(y), -np.sin(z) * np.sin(y), np.cos(z) * np.sin(y))
        self.batch.mocap_quat[rows, 3] = np.stack([*quat, np.sin(z) * np.cos(y)], 1)

    def control(self, action: Floats) -> None:
        played = self.playing[:, None]
        self.turn += TURN * action[:, 3:] * played
        self.turn[:, 0] = self.turn[:, 0].clip(-TILT, TILT)
        gripper = self.batch.mocap_pos[:, 3] + self.config.stride * action[:, :3] * played
        self.move(np.arange(self.num_envs), gripper)

    def vertices(self, rows: Rows) -> Floats:
        """Places [n, V, 3] of the sleeve's vertices: each slides from where it is at rest."""
        return self.rest + self.batch.qpos[rows].reshape(len(rows), -1, 3)

    def measured(self, rows: Rows) -> tuple[Floats, Floats, Floats]:
        """phi, s (0: the arm does not pass through the opening) and the distance of the opening's
        middle from the arm, m, [n] each."""
        arm = self.arm[rows]
        opening = self.vertices(rows)[:, OPENING]
        centre = opening.mean(1)
        s, threaded = passed(opening, arm)
        elbow = LENGTHS[1] + LENGTHS[2]
        phi = s + (UPPER - 1) * np.maximum(s - elbow, 0)
        approach = -np.linalg.norm(centre - arm[:, 3], axis=1)
        off = to_line(centre[:, None], arm)[0].min(2)[:, 0]
        return np.where(threaded, phi, approach), np.where(threaded, s, 0.0), off

    def outcome(self, action: Floats) -> Outcome:
        rows = np.arange(self.num_envs)
        phi, s, off = self.measured(rows)
        force = self.batch.sensordata.sum(1)
        gap = to_line(self.batch.mocap_pos[:, 3:], self.arm)[0][:, 0] - RADII
        hit = gap.min(1) < CLEAR
        align = 0.02 * (off < NEAR) - 0.05 * (off > FAR)
        reward = PAID * (phi - self.potential) + align - 0.01 * hit - self.config.force * force
        self.potential[:] = phi
        dressed = s / sum(LENGTHS)
        log = {"success": dressed >= 0.8, "dressed": dressed.astype(np.float32)}
        log |= {"force": force.astype(np.float32), "collided": hit}
        return Outcome(reward, np.zeros(self.num_envs, np.bool_), log)

    def observe(self, rows: Rows) -> dict[str, NDArray[Any]]:
        obs: dict[str, NDArray[Any]] = {}
        gripper = self.batch.mocap_pos[rows, 3]
        if "state" in self.spec.obs:
            obs["state"] = self.state(rows, gripper)
        clouds = [name for name in ("points", "full") if name in self.spec.obs]
        if clouds:
            points = self.surfaces(rows, gripper)
        for name in clouds:
            seen = self.visible(rows, points) if name == "points" else np.ones(points.shape[:2])
            obs[name] = self.cloud(points, seen.astype(bool), gripper)
        if WHICH in self.spec.obs:
            obs[WHICH] = self.which(rows)[:, None]
        if DEMONSTRATOR in self.spec.obs:
            obs[DEMONSTRATOR] = self.along(rows, gripper).astype(np.float32)
        return obs

    def state(self, rows: Rows, gripper: Floats) -> NDArray[np.float32]:
        opening = self.vertices(rows)[:, OPENING]
        centre = opening.mean(1)
        normal = np.cross(opening[:, 0] - centre, opening[:, AROUND // 4] - centre)
        normal /= np.linalg.norm(normal, axis=1, keepdims=True) + 1e-9
        joints = (self.arm[rows] - gripper[:, None]).reshape(len(rows), -1)
        phi, s, off = self.measured(rows)
        numbers = np.stack([phi, s, off], 1)
        parts = [joints, centre - gripper, normal, self.turn[rows], numbers]
        return np.concatenate(parts, 1, dtype=np.float32)

    def surfaces(self, rows: Rows, gripper: Floats) -> Floats:
        """Points [n, P, 3] on all surfaces, m: the gripper, the sleeve's vertices, the arm."""
        pos = self.batch.mocap_pos[rows, :3, None]
        arm = np.einsum("nsij,spj->nspi", matrices(self.batch.mocap_quat[rows, :3]), skin()) + pos
        cloth = self.vertices(rows)
        return np.concatenate([gripper[:, None], cloth, arm.reshape(len(rows), -1, 3)], 1)

    def visible(self, rows: Rows, points: Floats) -> NDArray[np.bool_]:
        """Which of `points` [n, P, 3] the camera sees; the gripper's always: the robot knows it."""
        ray = points - EYE
        far = np.linalg.norm(ray, axis=2)
        hit, _ = self.batch.ray(EYE, ray / far[..., None], ids=rows)
        seen = (hit < 0) | (hit > far - 0.005)
        seen &= ~behind(points, self.vertices(rows), EYE)
        seen[:, 0] = True
        return seen

    def cloud(self, points: Floats, seen: NDArray[np.bool_], gripper: Floats) -> Any:
        """The cloud [n, N, 6] of those of `points` [n, P, 3] that are `seen` [n, P]."""
        kinds = np.full(points.shape[1], 1)
        kinds[0] = 2
        kinds[1 : 1 + AROUND * ALONG] = 0
        # `farthest` expects the points that count first.
        order = np.argsort(~seen, 1, kind="stable")
        points = np.take_along_axis(points, order[..., None], 1)
        valid = np.take_along_axis(seen, order, 1)
        index = farthest(torch.from_numpy(points), torch.from_numpy(valid), self.config.points)
        chosen = index.numpy()
        place = np.take_along_axis(points, chosen[..., None], 1) - gripper[:, None]
        return np.concatenate(
            [place, np.eye(CLASSES)[kinds[np.take_along_axis(order, chosen, 1)]]],
            2,
            dtype=np.float32,
        )

    def along(self, rows: Rows, gripper: Floats) -> Floats:
        """Actions [n, 5] of the path along the known arm: the gripper goes to a point above the arm
        that is ahead of it, turned against the arm's direction."""
        arm = self.arm[rows]
        line = arm[:, ::-1]
        ends = np.cumsum([0.0, *LENGTHS[::-1]])
        below = gripper - (0, 0, 0.9 * WIDE)
        gaps, share = to_line(below[:, None], arm)
        part = gaps[:, 0].argmin(1)  # 0: the upper arm
        every = np.arange(len(rows))
        at = ends[2 - part] + (1 - share[every, 0, part]) * np.array(LENGTHS)[part]
        # A turn is begun before the elbow.
        ahead = np.stack([_at(line, ends, at + look) for look in (0.03, 0.06)], 1)
        aim = ahead[:, 0] + (0, 0, 0.9 * WIDE) - gripper
        way = _at(line, ends, at - 0.02) - ahead[:, 1]
        heading = np.arctan2(way[:, 1], way[:, 0])
        turn = heading - self.turn[rows, 1]
        turn = (turn + math.pi) % (2 * math.pi) - math.pi
        level = -self.turn[rows, 0]
        parts = [aim / self.config.stride, level[:, None] / TURN, turn[:, None] / TURN]
        return np.concatenate(parts, 1).clip(-1, 1)


STATE = 4 * 3 + 3 + 3 + 2 + 3


def _at(line: Floats, ends: Floats, s: Floats) -> Floats:
    """The places [n, 3] at arc length `s` [n] of the lines [n, 4, 3] from the fingertip on."""
    s = s.clip(0, ends[-1] - 0.01)
    part = (np.searchsorted(ends, s, side="right") - 1).clip(0, len(ends) - 2)
    every = np.arange(len(s))
    start, stop = line[every, part], line[every, part + 1]
    share = (s - ends[part]) / (ends[part + 1] - ends[part])
    return start + share[:, None] * (stop - start)


def tube() -> Floats:
    """The vertices [AROUND * ALONG, 3] of the sleeve at rest, m: the opening is at x = 0, seen from
    the tube it looks to -x; vertex 0 of a ring is its top."""
    angle = 2 * np.pi * np.arange(AROUND) / AROUND
    ring = np.stack([0 * angle, WIDE * np.sin(angle), WIDE * np.cos(angle)], 1)
    return np.concatenate([ring + np.array([STEP * j, 0, 0]) for j in range(ALONG)])


def triangles() -> NDArray[np.int64]:
    """The triangles [T, 3] of the sleeve: numbers of its vertices."""
    ring, place = np.divmod(np.arange(AROUND * (ALONG - 1)), AROUND)
    a = AROUND * ring + place
    b = AROUND * ring + (place + 1) % AROUND
    lower = np.stack([a, b, a + AROUND], 1)
    upper = np.stack([b, b + AROUND, a + AROUND], 1)
    return np.concatenate([lower, upper])


def xml() -> str:
    """The scene: an arm of three capsules, a gripper, the sleeve that it holds."""
    points = " ".join(f"{value:.6g}" for value in tube().flatten())
    faces = " ".join(str(value) for value in triangles().flatten())
    parts = ""
    touch = ""
    for name, length, radius in zip(("upper", "fore", "hand"), LENGTHS, RADII, strict=True):
        end = length - radius if name == "hand" else length
        parts += f"""
        <body name="{name}" mocap="true"><site name="{name}" type="box" size="1 1 1" group="5"/>
        <geom type="capsule" size="{radius}" fromto="0 0 0 {end} 0 0" rgba=".8 .6 .5 1"/></body>"""
        touch += f'<touch site="{name}"/>'
    # Vertices have no turn of their own, so they are not welded.
    held = ""
    for i in (0, 1, AROUND - 1):
        x, y, z = tube()[i] - (0, 0, WIDE)
        held += f'<connect body1="gripper" body2="sleeve_{i}" anchor="{x} {y} {z}"/>'
    eye = " ".join(str(value) for value in EYE)
    return f"""<mujoco><option timestep="{DT}" solver="CG" iterations="30"
      integrator="implicitfast"/><size memory="60M"/>
    <visual><headlight ambient=".4 .4 .4"/></visual>
    <asset><texture type="skybox" builtin="flat" rgb1=".9 .9 .9" width="32" height="32"/></asset>
    <worldbody><light pos="0 -1 2" dir="0 .4 -1"/>
      <camera name="camera" pos="{eye}" xyaxes="1 0 0 0 .55 .85" fovy="50"/>{parts}
      <body name="gripper" mocap="true" pos="0 0 {WIDE}"><geom type="box" size=".01 .03 .01"
        contype="0" conaffinity="0" group="1" rgba=".2 .2 .2 1"/></body>
      <flexcomp name="sleeve" type="direct" dim="2" radius="0.004" mass="0.06" point="{points}"
        element="{faces}" rgba=".3 .4 .8 1"><edge equality="true" damping="0.05"/>
        <contact selfcollide="none" condim="3" friction="0.2"/></flexcomp>
    </worldbody><equality>{held}</equality><sensor>{touch}</sensor></mujoco>"""


def posed(angles: Floats) -> tuple[Floats, Floats]:
    """Joints [n, 4, 3] (m, from the shoulder to the fingertip) and the quaternions [n, 3, 4] of the
    parts of arms with `angles` [n, 3] (see ANGLES)."""
    up, bent, forearm = angles.T
    azimuth = np.stack([0 * bent, bent, bent], 1)
    raised = np.stack([up, up + forearm, up + forearm], 1)
    flat = np.cos(raised)
    way = np.stack([flat * np.cos(azimuth), flat * np.sin(azimuth), np.sin(raised)], 2)
    steps = way * np.array(LENGTHS)[:, None]
    joints = np.concatenate([np.zeros((len(angles), 1, 3)), steps.cumsum(1)], 1)
    y, z = -0.5 * raised, 0.5 * azimuth
    first = (np.cos(z) * np.cos(y), -np.sin(z) * np.sin(y))
    return joints, np.stack([*first, np.cos(z) * np.sin(y), np.sin(z) * np.cos(y)], 2)


def rotation(turn: Floats) -> Floats:
    """Matrices [n, 3, 3] of turns [n, 2] about y, then about z, rad."""
    (cy, cz), (sy, sz) = np.cos(turn).T, np.sin(turn).T
    none = 0 * cy
    rows = [[cz * cy, -sz, cz * sy], [sz * cy, cz, sz * sy], [-sy, none, cy]]
    return np.array(rows).transpose(2, 0, 1)


def matrices(quat: Floats) -> Floats:
    """Matrices [..., 3, 3] of unit quaternions [..., 4]."""
    w, x, y, z = np.moveaxis(quat, -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.moveaxis(np.array(rows), (0, 1), (-2, -1))


def skin(rings: int = 4, around: int = 8) -> Floats:
    """Points [3, rings * around, 3] (m) on the capsules of the arm, each in its own frame."""
    angle = 2 * np.pi * np.arange(around) / around
    made: list[Floats] = []
    for length, radius in zip(LENGTHS, RADII, strict=True):
        x = np.linspace(0.1, 0.9, rings) * length
        place, turn = (value.flatten() for value in np.meshgrid(x, angle))
        made.append(np.stack([place, radius * np.cos(turn), radius * np.sin(turn)], 1))
    return np.stack(made)


def to_line(points: Floats, arm: Floats) -> tuple[Floats, Floats]:
    """Distances [n, P, 3] (m) of points [n, P, 3] from the parts of arms [n, 4, 3], and where on
    the part the nearest place is, 0 (its first joint) to 1."""
    start = arm[:, None, :-1]
    step = arm[:, None, 1:] - start
    offset = points[:, :, None] - start
    share = (offset * step).sum(3) / (step * step).sum(3)
    share = share.clip(0, 1)
    return np.linalg.norm(offset - share[..., None] * step, axis=3), share


def passed(opening: Floats, arm: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Arc length s [n] (m, from the fingertip, at most the arm's) at which arms [n, 4, 3] first
    pass through openings [n, A, 3], and whether they do so once and out of the tube, [n]: the signs
    of the crossings of the triangles between the opening's middle and its edge sum to 1."""
    beyond = arm[:, 0] - 0.3 * (arm[:, 1] - arm[:, 0]) / LENGTHS[0]  # into the trunk
    line = np.concatenate([arm[:, ::-1], beyond[:, None]], 1)
    start = line[:, :-1, None]
    step = line[:, 1:, None] - start  # [n, K, 1, 3]
    centre = opening.mean(1)[:, None, None]
    one = opening[:, None] - centre
    two = np.roll(opening, -1, 1)[:, None] - centre
    normal = np.cross(one, two)  # [n, 1, A, 3]
    slope = (step * normal).sum(3)
    slope = np.where(np.abs(slope) < 1e-12, 1e-12, slope)
    share = ((centre - start) * normal).sum(3) / slope
    place = start + share[..., None] * step - centre
    area = (normal * normal).sum(3) + 1e-18
    u = (np.cross(place, two) * normal).sum(3) / area
    v = (np.cross(one, place) * normal).sum(3) / area
    crosses = (share >= 0) & (share < 1) & (u >= 0) & (v >= 0) & (u + v <= 1)
    length = np.array([*LENGTHS[::-1], 0.3])
    before = np.cumsum(length) - length
    s = np.where(crosses, before[:, None] + share * length[:, None], np.inf).min((1, 2))
    once = (crosses * np.sign(slope)).sum((1, 2)) == 1
    return np.minimum(s, sum(LENGTHS)), once


def behind(points: Floats, vertices: Floats, eye: Floats) -> NDArray[np.bool_]:
    """Which of points [n, P, 3] the sleeve with `vertices` [n, V, 3] hides from `eye` [3]: the ray
    is inside of the three planes through the eye and a triangle's sides, and meets it before."""
    corner = (vertices - eye)[:, triangles()]  # [n, T, 3, 3]
    ray = (points - eye).swapaxes(1, 2)
    side = [np.cross(corner[:, :, i], corner[:, :, (i + 1) % 3]) @ ray for i in range(3)]
    inside = (np.minimum.reduce(side) >= 0) | (np.maximum.reduce(side) <= 0)
    normal = np.cross(corner[:, :, 1] - corner[:, :, 0], corner[:, :, 2] - corner[:, :, 0])
    slope = normal @ ray
    reach = (normal * corner[:, :, 0]).sum(2)[..., None]
    share = reach / np.where(np.abs(slope) < 1e-15, 1e-15, slope)
    # A point of the cloth itself is not behind it.
    near = 1 - 0.008 / np.linalg.norm(ray, axis=1)[:, None]
    return (inside & (share > 0) & (share < near)).any(1)
