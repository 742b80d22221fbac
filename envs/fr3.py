"""FR3 tasks on a table in batched MuJoCo, driven by the controller that drives the real arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.core.spec import Leaf, Spec
from embodied.embodiments import cartesian, fr3
from embodied.embodiments.cartesian import CartesianDelta
from envs.cameras import Cameras
from envs.fr3_scene import compile_scene
from envs.mujoco import MujocoVecEnv, Outcome, Rows, action_leaf
from envs.tasks import TASKS
from envs.tasks.task import Floats, Parameter, Task, View

ROBOT_NAMES = (
    *(f"q{i}" for i in range(1, 8)),
    *(f"dq{i}" for i in range(1, 8)),
    *(f"tool_{axis}" for axis in "xyz"),
    *(f"lead_{axis}" for axis in "xyz"),
    "width",
)


@dataclass(frozen=True)
class Config:
    """`ranges` narrows or widens task parameters by name, `horizon` is in control steps (20 Hz;
    None: the task's own), `cameras` are "front" and "wrist"."""

    task: str = "lift"
    num_envs: int = 16
    reward: Literal["sparse", "shaped"] = "sparse"
    cameras: tuple[str, ...] = ()
    image_size: int = 96
    horizon: int | None = None
    threads: int = 2
    seed: int = 0
    turning: Literal["none", "yaw", "full"] = "none"
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class Fr3(MujocoVecEnv):
    """B FR3s with one of the tasks of `envs.tasks` in front of each."""

    def __init__(self, config: Config) -> None:
        if config.task not in TASKS:
            raise ValueError(f"no FR3 task {config.task!r}; there are {sorted(TASKS)}")
        if config.reward not in ("sparse", "shaped"):
            raise ValueError(f"reward is {config.reward!r}; choose sparse or shaped")
        self.config, self.what = config, TASKS[config.task]()
        self.parameters = _ranged(self.what, config.ranges, config.task)
        self.controller = CartesianDelta(cartesian.Config(turning=config.turning))
        self.draws = self.what.draws
        dt = self.controller.config.dt
        model = compile_scene(self.what, pictures=False)
        horizon = self.what.horizon if config.horizon is None else config.horizon
        super().__init__(
            model,
            _spec(self.what, self.controller, dt),
            config.num_envs,
            substeps=round(dt / self.what.timestep),
            horizon=horizon,
            threads=config.threads,
            seed=config.seed,
            name=f"fr3_{config.task}",
            cameras=Cameras(tuple(config.cameras), config.image_size) if config.cameras else None,
        )
        self._low = np.array([parameter.low for parameter in self.parameters])
        self._span = np.array([parameter.high for parameter in self.parameters]) - self._low
        self._free = {name: _addresses(model, name) for name in self.what.free}
        self._picture: tuple[mujoco.MjModel, mujoco.MjData] | None = None
        self._remember(num_envs=config.num_envs)

    def control(self, action: Floats) -> None:
        memory = self.memory
        reference = {key: memory[key] for key in ("place", "turn", "q", "width")}
        joints, width, moved = self.controller(action, self.batch.qpos[:, :7], reference)
        for key, value in moved.items():
            memory[key][:] = value
        self.batch.ctrl[:, :7], self.batch.ctrl[:, 7] = joints, width / 2

    def observe(self, rows: Rows) -> dict[str, NDArray[np.generic]]:
        view = self.view(rows)
        robot = [view.q, view.dq, view.tool, view.lead, view.width[:, None]]
        state = np.concatenate([*robot, self.what.observe(view)], 1)
        return {"state": state.astype(np.float32)}

    def outcome(self, action: Floats) -> Outcome:
        view = self.view(np.arange(self.num_envs))
        success = self.what.success(view)
        terms = {name: term(view) for name, term in self.what.terms.items()}
        if self.config.reward == "sparse":
            reward = success.astype(float)
        else:
            reward = sum(self.what.weights[name] * value for name, value in terms.items())
            reward = np.where(success, 1.0, np.asarray(reward) / 10)
        log = {"success": success, **{f"term/{key}": value for key, value in terms.items()}}
        return Outcome(reward, success, log)

    def place(self, rows: Rows, draws: Floats) -> None:
        start = self.what.start(self.native(rows), draws)
        q = self.controller.reach(start.tool)
        tool, _, _ = fr3.forward(q)
        qpos = self.batch.qpos
        qpos[rows, :7] = q
        qpos[rows, 7:9] = start.width[:, None] / 2
        held = {key: (tool + offset, turn) for key, (offset, turn) in start.held.items()}
        for name, (place, turn) in {**start.free, **held}.items():
            first, _ = self._free[name]
            qpos[rows, first : first + 3], qpos[rows, first + 3 : first + 7] = place, turn
        for name, place in start.marker.items():
            self.batch.mocap_pos[rows, self.model.body(name).mocapid[0]] = place
        reference = self.controller.begin(q, start.width)
        for key, value in {**reference, **start.memory}.items():
            self.memory[key][rows] = value
        self.batch.ctrl[rows, :7], self.batch.ctrl[rows, 7] = q, 0.0
        self.batch.ctrl[rows, 7] = start.width / 2
        if self.what.settle:
            self.batch.ctrl[rows, 7] = 0.0
            self.memory["width"][rows] = 0.0
            self.batch.step(rows, nstep=self.what.settle)

    def retask(self, rows: Rows) -> None:
        for (name, geom), value in self.what.shape(self.native(rows)).items():
            self.batch.expand(name)[rows, self.model.geom(geom).id] = value

    def native(self, rows: Rows) -> dict[str, Floats]:
        """Task parameters [n] of `rows` in their own units, by name."""
        values = self._low + self.task[rows] * self._span
        return {each.name: values[:, i] for i, each in enumerate(self.parameters)}

    def view(self, rows: Rows) -> View:
        """What rewards, observations and texts see of `rows`."""
        qpos = self.batch.qpos[rows]
        tool, _, _ = fr3.forward(qpos[:, :7])
        place = {name: qpos[:, at : at + 3] for name, (at, _) in self._free.items()}
        for name in self.what.markers:
            place[name] = self.batch.mocap_pos[rows, self.model.body(name).mocapid[0]]
        return View(
            q=qpos[:, :7],
            dq=self.batch.qvel[rows, :7],
            tool=tool,
            lead=self.memory["place"][rows] - tool,
            width=qpos[:, 7] + qpos[:, 8],
            place=place,
            turn={name: qpos[:, at + 3 : at + 7] for name, (at, _) in self._free.items()},
            param=self.native(rows),
            memory={key: self.memory[key][rows] for key in self._own},
        )

    def scene(self, row: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        if self._picture is None:
            model = compile_scene(self.what, pictures=True)
            self._picture = model, mujoco.MjData(model)
        model, data = self._picture
        for (name, geom), value in self.what.shape(self.native(np.array([row]))).items():
            getattr(model, name)[model.geom(geom).id] = value[0]
        everything = mujoco.mjtState.mjSTATE_INTEGRATION.value
        mujoco.mj_setState(model, data, self.batch.state[row], everything)
        mujoco.mj_forward(model, data)
        return model, data

    def describe(self, row: int = 0) -> str:
        return self.what.describe(self.view(np.array([row])))

    def _remember(self, num_envs: int) -> None:
        """Allocate the per-row memory: the controller's reference and what the task draws."""
        half = {each.name: np.full(1, (each.low + each.high) / 2) for each in self.parameters}
        own = self.what.start(half, np.full((1, self.draws), 0.5)).memory
        reference = self.controller.begin(fr3.HOME[None], np.zeros(1))
        self._own = tuple(own)
        for key, value in {**reference, **own}.items():
            self.memory[key] = np.zeros((num_envs, *value.shape[1:]))


def _spec(task: Task, controller: CartesianDelta, dt: float) -> Spec:
    names = (*ROBOT_NAMES, *task.names)
    vector = tuple(parameter.name for parameter in task.parameters)
    return Spec(
        obs={"state": Leaf((len(names),), names=names)},
        act=action_leaf(controller.names),
        dt=dt,
        task=Leaf((len(vector),), low=0.0, high=1.0, names=vector),
        text=task.text,
    )


def _ranged(
    task: Task, ranges: Mapping[str, tuple[float, float]], name: str
) -> tuple[Parameter, ...]:
    known = [parameter.name for parameter in task.parameters]
    for key in ranges:
        if key not in known:
            raise ValueError(f"ranges: {name} has no parameter {key!r}; it has {known}")
    return tuple(
        Parameter(each.name, *ranges.get(each.name, (each.low, each.high)), each.unit)
        for each in task.parameters
    )


def _addresses(model: mujoco.MjModel, name: str) -> tuple[int, int]:
    """Where a free body's position begins in qpos and in qvel."""
    joint = model.joint(name)
    return int(joint.qposadr[0]), int(joint.dofadr[0])
