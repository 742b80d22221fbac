"""A simulated FR3 (MuJoCo) as a driver, with measurement delay, lost reads and noise.

Physics run in real time: every read first catches up with the clock. Without a `world` it is the
manufacturer's model as it ships, with its joint friction and armature, not the model used in
training. A `world` brings its own model, objects in front of the arm and a measure of success.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mujoco
import numpy as np

from embodied.core.build import Node, build
from embodied.embodiments import fr3
from real_robot.control.arm_state import ArmState, Floats
from real_robot.drivers.driver import Driver, DriverError

BEHIND = 0.25  # s of physics that are caught up with at most: after a stall the world goes on late


@dataclass(frozen=True)
class Config:
    """`delay` (s) of every measurement; `lost`: share of reads that get an old one; `noise` (rad,
    deviation) of joint positions; `fails_at`: s after connecting the wire breaks (None: never);
    `world`: a node of a `World`."""

    delay: float = 0.0
    lost: float = 0.0
    noise: float = 0.0
    fails_at: float | None = None
    seed: int = 0
    world: Node | None = None


class World(Protocol):
    """What stands in front of a simulated FR3. `names` are what `sense` knows of it."""

    names: tuple[str, ...]

    def compile(self) -> mujoco.MjModel:
        """The FR3 among its things: actuators take joint positions, `hand` half the opening."""
        ...

    def begin(
        self, model: mujoco.MjModel, data: mujoco.MjData, random: np.random.Generator
    ) -> None:
        """Lay things out for another episode; the arm is left as it is."""
        ...

    def sense(self, data: mujoco.MjData) -> Floats:
        """The numbers named in `names`."""
        ...


class Sim(Driver):
    """Joint impedance and a hand; gravity is compensated, as the real robot does itself."""

    joints = fr3.JOINTS

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self.clock = config, clock
        self.random = np.random.default_rng(config.seed)
        self.kept: deque[tuple[ArmState, float]] = deque()
        self.connected = False
        self.world: World | None = None if config.world is None else build(config.world)
        self.sensed = () if self.world is None else self.world.names

    def connect(self) -> None:
        self.model = _alone() if self.world is None else self.world.compile()
        self.data = mujoco.MjData(self.model)
        self.at = [self.model.joint(name).qposadr[0] for name in fr3.JOINTS]
        self.dof = [self.model.joint(name).dofadr[0] for name in fr3.JOINTS]
        self.fingers = [self.model.joint(name).qposadr[0] for name in fr3.FINGERS]
        self.data.qpos[self.at] = fr3.HOME
        self.servos = [self.model.actuator(name).id for name in fr3.JOINTS]
        # No world gives the arm more strength than it has.
        self.model.actuator_forcelimited[self.servos] = 1
        self.model.actuator_forcerange[self.servos] = np.stack([-fr3.TORQUE, fr3.TORQUE], 1)
        self.hand = self.model.actuator("hand").id
        self.data.ctrl[self.servos] = fr3.HOME
        self.renew()
        mujoco.mj_forward(self.model, self.data)
        self.began = self.last = self.clock()
        self.kept.clear()
        self.connected = True

    def read(self) -> ArmState:
        now = self._run()
        data, noise = self.data, self.random.normal(0, self.config.noise, len(self.at))
        measured = ArmState(
            data.qpos[self.at] + noise,
            data.qvel[self.dof].copy(),
            data.actuator_force[self.servos].copy(),
            now,
        )
        self.kept.append((measured, float(data.qpos[self.fingers].sum())))
        lost = self.config.lost and self.random.random() < self.config.lost
        while len(self.kept) > 1 and not lost and self.kept[1][0].t <= now - self.config.delay:
            self.kept.popleft()
        return self.kept[0][0]

    def write(self, q: Floats, width: float) -> None:
        self._run()
        self.data.ctrl[self.servos] = q
        self.data.ctrl[self.hand] = width / fr3.OPEN * self.model.actuator_ctrlrange[self.hand, 1]

    @property
    def width(self) -> float:
        return self.kept[0][1] if self.kept else 0.0

    def stop(self) -> None:
        if self.connected:
            self.data.ctrl[self.servos] = self.data.qpos[self.at]

    def close(self) -> None:
        self.connected = False

    def _run(self) -> float:
        """Let physics catch up with the clock; DriverError where the wire is broken."""
        now = self.clock()
        if not self.connected:
            raise DriverError("the simulated arm is not connected")
        fails = self.config.fails_at
        if fails is not None and now - self.began > fails:
            raise DriverError("the simulated wire is broken (fails_at)")
        self.last = max(self.last, now - BEHIND)
        steps = int((now - self.last) / self.model.opt.timestep)
        if steps:
            mujoco.mj_step(self.model, self.data, steps)
            self.last += steps * self.model.opt.timestep
        return now

    def sense(self) -> Floats:
        return np.zeros(0) if self.world is None else self.world.sense(self.data)

    def renew(self) -> None:
        if self.world is not None:
            self.world.begin(self.model, self.data, self.random)


def _alone() -> mujoco.MjModel:
    """The arm as its manufacturer ships it, and nothing else."""
    source = fr3.mjcf()
    spec = mujoco.MjSpec.from_file(str(source))
    spec.meshdir = str(source.parent / "meshes")
    for i, name in enumerate(fr3.JOINTS):
        servo = spec.actuator(name)
        servo.gainprm[0] = fr3.STIFFNESS[i]
        servo.biasprm[1:3] = -fr3.STIFFNESS[i], -fr3.DAMPING[i]
    model = spec.compile()
    model.body_gravcomp[1:] = 1.0  # as the real robot does itself
    return model
