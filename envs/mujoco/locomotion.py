"""Gymnasium's Ant, Humanoid, Hopper, HalfCheetah and Walker2d (v5) in batched MuJoCo.

Source: Gymnasium v5 environments (Towers et al., 2024). The reward of a step is

    r = w_f dx/dt + w_h [healthy] - w_c |u|^2 - min(w_x |f|^2, cap)

with u the native controls and f the external contact forces. Values equal Gymnasium's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Count, CountOrZero
from embodied.core.spec import Leaf, Spec
from embodied.envs.mujoco.batch_env import DataPool, MujocoVecEnv, Outcome, Rows, action_leaf

Floats = NDArray[np.float64]
Range = tuple[float, float]
ANYWHERE = (-np.inf, np.inf)


@dataclass(frozen=True)
class World:
    """Definition of one environment: model, substeps, reward weights and healthy range.

    `skip` leading positions are left out of the observation; `outputs` are MjData fields that the
    observation or the reward needs, `seen` those that are observed (world body left out); `mark`
    selects whose x is rewarded: the first coordinate, body 1, or the centre of mass.
    """

    xml: str
    substeps: int
    forward: float = 1.0
    healthy: float = 0.0
    ctrl: float = 1e-3
    contact: float = 0.0
    contact_cap: float = np.inf
    contact_clip: Range | None = None
    height: Range = ANYWHERE
    includes_ends: bool = False
    angle: Range = ANYWHERE
    others: Range = ANYWHERE
    speed: float = np.inf
    skip: int = 1
    mark: str = "coordinate"
    outputs: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    noise: float = 5e-3
    normal_speed: bool = False


WORLDS = {
    "Hopper-v5": World(
        "hopper.xml", 4, healthy=1.0, height=(0.7, np.inf), angle=(-0.2, 0.2),
        others=(-100.0, 100.0), speed=10.0,
    ),
    "Walker2d-v5": World(
        "walker2d_v5.xml", 4, healthy=1.0, height=(0.8, 2.0), angle=(-1.0, 1.0), speed=10.0
    ),
    "HalfCheetah-v5": World("half_cheetah.xml", 5, ctrl=0.1, noise=0.1, normal_speed=True),
    "Ant-v5": World(
        "ant.xml", 5, healthy=1.0, ctrl=0.5, contact=5e-4, contact_clip=(-1.0, 1.0),
        height=(0.2, 1.0), includes_ends=True, skip=2, mark="body", outputs=("xpos", "cfrc_ext"),
        seen=("cfrc_ext",), noise=0.1, normal_speed=True,
    ),
    "Humanoid-v5": World(
        "humanoid.xml", 5, forward=1.25, healthy=5.0, ctrl=0.1, contact=5e-7, contact_cap=10.0,
        height=(1.0, 2.0), skip=2, mark="mass",
        outputs=("xipos", "cinert", "cvel", "qfrc_actuator", "cfrc_ext"),
        seen=("cinert", "cvel", "qfrc_actuator", "cfrc_ext"), noise=1e-2,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Settings of a locomotion environment."""

    id: str = "Ant-v5"  # Gymnasium's: Ant-v5, ...
    num_envs: Count = 16  # parallel environments
    threads: Count = 2  # CPU threads
    horizon: Count = 1000  # control steps of an episode
    seed: CountOrZero = 0  # of the random numbers


class Locomotion(MujocoVecEnv):
    """B parallel copies of a Gymnasium locomotion task; `precision` is the numpy type of
    observations.
    """

    precision: type = np.float32

    def __init__(self, config: Config) -> None:
        if config.id not in WORLDS:
            raise ValueError(f"unknown environment {config.id!r}; choose from {', '.join(WORLDS)}")
        self.config = config
        self.world = WORLDS[config.id]
        assets = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
        model = mujoco.MjModel.from_xml_path(str(assets / self.world.xml))
        self.draws = model.nq + model.nv
        sizes = {"cinert": 10 * (model.nbody - 1), "cvel": 6 * (model.nbody - 1)}
        sizes |= {"cfrc_ext": 6 * (model.nbody - 1), "qfrc_actuator": model.nv - 6}
        size = model.nq - self.world.skip + model.nv + sum(sizes[part] for part in self.world.seen)
        names = tuple(model.actuator(i).name for i in range(model.nu))
        dt = model.opt.timestep * self.world.substeps
        super().__init__(
            model,
            Spec(
                {"state": Leaf((size,))}, action_leaf(names), dt, text=f"Run forward ({config.id})."
            ),
            config.num_envs,
            substeps=self.world.substeps,
            horizon=config.horizon,
            threads=config.threads,
            seed=config.seed,
            name=config.id,
        )
        if self.world.outputs:
            self.batch: Any = DataPool(model, config.num_envs, config.threads, self.world.outputs)
        low, high = model.actuator_ctrlrange.T
        self._middle = (low + high) / 2
        self._half = (high - low) / 2
        # Position at the end of the last step; part of the state, because `xpos` lags `qpos`.
        self._before = np.zeros(config.num_envs)
        self.memory = {"before": self._before}

    def control(self, action: Floats) -> None:
        self.batch.ctrl[:] = self._middle + self._half * action

    def observe(self, rows: Rows) -> dict[str, NDArray[Any]]:
        world = self.world
        batch = self.batch
        speed = np.clip(batch.qvel[rows], -world.speed, world.speed)
        parts = [batch.qpos[rows, world.skip :], speed]
        parts += [self._seen(name, rows) for name in world.seen]
        return {"state": np.concatenate(parts, axis=1, dtype=self.precision)}

    def _seen(self, name: str, rows: Rows) -> Floats:
        values = getattr(self.batch, name)[rows]
        if name == "qfrc_actuator":
            return values[:, 6:]
        if name == "cfrc_ext" and self.world.contact_clip is not None:
            values = values.clip(*self.world.contact_clip)
        return values[:, 1:].reshape(len(rows), -1)

    def outcome(self, action: Floats) -> Outcome:
        world = self.world
        position = self._position()
        velocity = (position - self._before) / self.spec.dt
        self._before[:] = position
        healthy = self._healthy()
        effort = world.ctrl * np.square(self.batch.ctrl).sum(1)
        reward = world.forward * velocity + world.healthy * healthy - effort - self._contact_cost()
        ends = ~healthy if world.healthy else np.zeros(self.num_envs, np.bool_)
        return Outcome(reward, ends, {"velocity": velocity.astype(np.float32)})

    def _position(self) -> Floats:
        """The x (m) whose change is rewarded, [B]."""
        if self.world.mark == "coordinate":
            return self.batch.qpos[:, 0].copy()
        if self.world.mark == "body":
            return self.batch.xpos[:, 1, 0].copy()
        mass = self.model.body_mass
        return self.batch.xipos[:, :, 0] @ mass / mass.sum()

    def _contact_cost(self) -> Floats | float:
        world = self.world
        if not world.contact:
            return 0.0
        force = self.batch.cfrc_ext
        if world.contact_clip is not None:
            force = force.clip(*world.contact_clip)
        cost = world.contact * np.square(force).sum((1, 2))
        return np.minimum(cost, world.contact_cap)

    def _healthy(self) -> NDArray[np.bool_]:
        world = self.world
        qpos = self.batch.qpos
        qvel = self.batch.qvel
        height = qpos[:, 2 if world.skip == 2 else 1]
        low, high = world.height
        if world.includes_ends:
            finite = np.isfinite(qpos).all(1) & np.isfinite(qvel).all(1)
            return finite & (low <= height) & (height <= high)
        well = (low < height) & (height < high)
        if world.angle != ANYWHERE:
            well &= _inside(qpos[:, 2], world.angle)
        if world.others != ANYWHERE:
            well &= _inside(qpos[:, 2:], world.others).all(1) & _inside(qvel, world.others).all(1)
        return well

    def draw(self, generator: np.random.Generator) -> Floats:
        nq = self.model.nq
        nv = self.model.nv
        noise = self.world.noise
        position = generator.uniform(-noise, noise, nq)
        if self.world.normal_speed:
            return np.concatenate([position, noise * generator.standard_normal(nv)])
        return np.concatenate([position, generator.uniform(-noise, noise, nv)])

    def place(self, rows: Rows, draws: Floats) -> None:
        self.batch.qpos[rows] += draws[:, : self.model.nq]
        self.batch.qvel[rows] += draws[:, self.model.nq :]

    def _begin(self, rows: Rows, task: Floats | None) -> None:
        super()._begin(rows, task)
        self._before[rows] = self._position()[rows]

    def close(self) -> None:
        super().close()
        if isinstance(self.batch, DataPool):
            self.batch.close()


def _inside(values: Floats, bounds: Range) -> NDArray[np.bool_]:
    return (bounds[0] < values) & (values < bounds[1])
