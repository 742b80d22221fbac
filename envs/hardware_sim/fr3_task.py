"""A simulated task in front of a simulated FR3 that is controlled through a robot driver.

The same objects, initial states and success condition as in training, but physics run in real time
behind a driver, and the deployment's processes act on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import mujoco
import numpy as np

from embodied.core.bounds import Ranges
from embodied.embodiments import fr3
from embodied.envs.fr3.base import (
    JointValues,
    TaskInstance,
    addresses,
    compile_scene,
    mocaps,
    view_of,
    write_joints,
)
from embodied.real_robot.drivers.sim import World
from embodied.real_robot.kernel.arm_state import Floats


@dataclass(frozen=True)
class Config:
    """Settings of what stands on the simulated arm's table."""

    task: str  # of `embodied.envs.fr3.tasks` (reach, lift, push, ...)
    ranges: Ranges = field(default_factory=dict)  # ranges of task parameters, by name
    lasting: bool = False  # laid out once; nobody puts anything back, as on a real table
    arm: Mapping[str, JointValues] = field(default_factory=dict)  # joint parameters by name


class TaskWorld(World):
    """`names`: the task's part of the observation, `contact_force` (N) where the task has touch
    sensors, then `success` (0 or 1)."""

    def __init__(self, config: Config) -> None:
        self.arm = config.arm
        self.lasting = config.lasting
        self.laid = False
        self.given = TaskInstance(config.task, "sparse", config.ranges)
        self.task = self.given.task
        force = ("contact_force",) if self.task.touch else ()
        self.names = (*self.task.names, *force, "success")

    def compile(self) -> mujoco.MjModel:
        """The scene that policies were trained in."""
        model = compile_scene(self.task, pictures=False)
        write_joints(model, self.arm)
        self.free = addresses(model, self.task)
        self.markers = mocaps(model, self.task)
        return model

    def begin(
        self, model: mujoco.MjModel, data: mujoco.MjData, random: np.random.Generator
    ) -> None:
        """Draw another task; objects are put where it wants them, at rest. The arm stays."""
        if self.lasting and self.laid:
            return
        self.laid = True
        self.touch = [int(model.sensor(name).adr[0]) for name in self.task.touch]
        self.param = self.given.native(random.random((1, len(self.given.parameters))))
        start = self.task.start(self.param, random.random((1, self.task.draws)))
        self.memory = start.memory
        for (name, geom), value in self.task.shape(self.param).items():
            getattr(model, name)[model.geom(geom).id] = value[0]
        for name, (place, turn) in start.bodies(fr3.forward(data.qpos[None, :7])[0]).items():
            at = self.free[name]
            data.qpos[at : at + 7] = np.concatenate([place[0], turn[0]])
            speed = model.joint(name).dofadr[0]
            data.qvel[speed : speed + 6] = 0.0
        for name, place in start.marker.items():
            data.mocap_pos[self.markers[name]] = place[0]

    def sense(self, data: mujoco.MjData) -> Floats:
        """The task's observation [names] as it is now."""
        state = (data.qpos[None], data.qvel[None], data.mocap_pos[None])
        view = view_of(*state, self.free, self.markers, None, self.param, self.memory)
        force = [data.sensordata[self.touch].sum()] if self.touch else []
        success = float(self.task.success(view)[0])
        return np.array([*self.task.observe(view)[0], *force, success])
