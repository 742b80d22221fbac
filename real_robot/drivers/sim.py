"""A simulated FR3 (MuJoCo) as a driver, with measurement delay, lost reads and noise.

Physics run in real time: every read first catches up with the clock. Without a `world` it is the
manufacturer's model as it ships, with its joint friction and armature, not the model used in
training. A `world` brings its own model, objects in front of the arm and a measure of success.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import mujoco
import numpy as np

from embodied.core.bounds import Bound, CountOrZero, Fraction, NonNegative, Number
from embodied.core.build import ConfigError, Node, build
from embodied.embodiments import fr3
from embodied.real_robot.control.arm_state import ArmState, Floats
from embodied.real_robot.drivers.driver import Driver, DriverError
from embodied.real_robot.drivers.sim_springs import Arm, Holds, JointHold, ToolHold
from embodied.real_robot.drivers.springs import Springs, Tool, check_stiffness, damped, span

GUIDED = 0.1  # of its damping: what a released arm keeps
BEHIND = 0.25  # s of physics that are caught up with at most: after a stall the world goes on late


@dataclass(frozen=True)
class Config:
    """Settings of the simulated FR3. `tool` is as in the Franka's driver."""

    delay: Annotated[float, Bound(0.0, 10.0)] = 0.0  # s by which every measurement is late
    lost: Fraction = 0.0  # share of reads that get an old measurement
    noise: Annotated[float, Bound(0.0, 10.0)] = 0.0  # standard deviation of joint positions, rad
    fails_at: NonNegative | None = None  # s after connecting when the wire breaks; null: never
    seed: CountOrZero = 0  # of the noise, the losses and the world
    world: Node | None = None  # node of a World before the arm; null: none
    tool: Tool | None = None  # springs on the tool's pose; null: on the joints
    start: tuple[Number, ...] | None = None  # joints [7] where it is found, rad; null: home pose

    def __post_init__(self) -> None:
        if self.start is not None and len(self.start) != len(fr3.JOINTS):
            raise ConfigError(f"driver.start: {len(fr3.JOINTS)} joint positions are needed")


class World(Protocol):
    """The things in front of a simulated FR3. `names` are those of the numbers of `sense`."""

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
    """Joint or Cartesian impedance and a hand; gravity is compensated, as the real robot does
    itself."""

    joints = fr3.JOINTS

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.random = np.random.default_rng(config.seed)
        self.kept: deque[tuple[ArmState, float]] = deque()
        self.connected = False
        self._hold: Holds | None = None
        self.world = None if config.world is None else build(config.world, World)
        self.sensed = () if self.world is None else self.world.names

    def connect(self) -> None:
        self.model = _alone() if self.world is None else self.world.compile()
        self.data = mujoco.MjData(self.model)
        self.arm = Arm(self.model, self.data)
        self.at = self.arm.at
        self.dof = self.arm.dof
        self.servos = self.arm.servos
        self.fingers = [self.model.joint(name).qposadr[0] for name in fr3.FINGERS]
        start = fr3.HOME if self.config.start is None else np.asarray(self.config.start)
        self.data.qpos[self.at] = start
        self.hand = self.model.actuator("hand").id
        tool = self.config.tool
        self._hold = JointHold(self.arm) if tool is None else ToolHold(self.arm, tool)
        self._hold.aim(start)
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
        self._held().aim(q)
        self.data.ctrl[self.hand] = width / fr3.OPEN * self.model.actuator_ctrlrange[self.hand, 1]

    @property
    def springs(self) -> Springs | None:
        return None if self._hold is None else self._hold.springs

    @property
    def stiffness(self) -> tuple[Floats, Floats] | None:
        return None if self._hold is None else span(self._hold.springs)

    def stiffen(self, stiffness: Floats) -> None:
        check_stiffness(stiffness, self.stiffness, "the simulated arm")
        hold = self._held()
        hold.gains(stiffness, damped(hold.springs, stiffness))

    def release(self) -> None:
        """No stiffness, and a little damping."""
        self._run()
        springs = self._held().springs
        self._held().gains(0 * springs.stiffness, GUIDED * springs.damping)

    def engage(self) -> None:
        self._run()
        self.stop()

    def _held(self) -> Holds:
        if self._hold is None:
            raise DriverError("the simulated arm is not connected")
        return self._hold

    @property
    def width(self) -> float:
        return self.kept[0][1] if self.kept else 0.0

    def stop(self) -> None:
        if self.connected and self._hold is not None:
            springs = self._hold.springs
            self._hold.aim(self.data.qpos[self.at].copy())
            self._hold.gains(springs.stiffness, springs.damping)

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
            self._held().run(steps)
            self.last += steps * self.model.opt.timestep
        return now

    def sense(self) -> Floats:
        return np.zeros(0) if self.world is None else self.world.sense(self.data)

    def renew(self) -> None:
        if self.world is not None:
            self.world.begin(self.model, self.data, self.random)


def _alone() -> mujoco.MjModel:
    """The arm as its manufacturer ships it, and nothing else."""
    return arm_spec().compile()


def arm_spec(
    stiffness: Sequence[float] = fr3.STIFFNESS, damping: Sequence[float] = fr3.DAMPING
) -> mujoco.MjSpec:
    """The manufacturer's model, held by a joint impedance (N m/rad, N m s/rad), its gravity
    compensated, as the real robot does itself."""
    source = fr3.mjcf()
    spec = mujoco.MjSpec.from_file(str(source))
    spec.meshdir = str(source.parent / "meshes")
    for body in spec.bodies[1:]:  # before it is compiled: a model without it is never given it
        body.gravcomp = 1.0
    for i, name in enumerate(fr3.JOINTS):
        servo = spec.actuator(name)
        servo.gainprm[0] = stiffness[i]
        servo.biasprm[1:3] = -stiffness[i], -damping[i]
    return spec
