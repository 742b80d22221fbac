"""Base of the FR3 environments: spec, observation, reward, task parameters and render scene."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import mujoco

from embodied.core.spec import Leaf, Spec
from embodied.embodiments.arrays import Floats, constant, namespace
from embodied.embodiments.controller import Controller
from embodied.envs.fr3.scene import compile_scene
from embodied.envs.fr3.tasks import TASKS
from embodied.envs.fr3.tasks.task import Flags, Parameter, Params, Task, View

ROBOT_NAMES = (
    *(f"q{i}" for i in range(1, 8)),
    *(f"dq{i}" for i in range(1, 8)),
    *(f"tool_{axis}" for axis in "xyz"),
    *(f"lead_{axis}" for axis in "xyz"),
    "width",
)
DT = 0.05
"""s of a control step."""
Ranges = Mapping[str, tuple[float, float]]
Worth = Literal["sparse", "shaped"]


class TaskInstance:
    """A task with its settings: parameter ranges, reward, and additional task parameters `more`.

    `name` is one of TASKS, or a task of one's own. ValueError if the name, the reward or a range is
    unknown.
    """

    def __init__(
        self, name: str | Task, worth: Worth, ranges: Ranges, more: tuple[Parameter, ...] = ()
    ) -> None:
        if isinstance(name, str) and name not in TASKS:
            raise ValueError(f"unknown FR3 task {name!r}; choose from {sorted(TASKS)}")
        if worth not in ("sparse", "shaped"):
            raise ValueError(f"unknown reward {worth!r}; choose sparse or shaped")
        self.task: Task = TASKS[name]() if isinstance(name, str) else name
        self.worth = worth
        self.parameters = (*_parameters_in_ranges(self.task, ranges), *more)
        self._low = tuple(each.low for each in self.parameters)
        self._span = tuple(each.high - each.low for each in self.parameters)

    def spec(self, controller: Controller) -> Spec:
        names = (*ROBOT_NAMES, *self.task.names)
        vector = tuple(parameter.name for parameter in self.parameters)
        return Spec(
            obs={"state": Leaf((len(names),), names=names)},
            act=Leaf((len(controller.names),), low=-1.0, high=1.0, names=controller.names),
            dt=DT,
            task=Leaf((len(vector),), low=0.0, high=1.0, names=vector),
            text=self.task.text,
        )

    def native(self, vector: Floats) -> dict[str, Floats]:
        """Task parameters [n] in their own units, by name, of task vectors [n, D]."""
        values = constant(self._low, vector) + vector * constant(self._span, vector)
        return {each.name: values[:, i] for i, each in enumerate(self.parameters)}

    def observe(self, view: View) -> Floats:
        """The state observation [n, S], in the order of the spec's names."""
        robot = [view.q, view.dq, view.tool, view.lead, view.width[:, None]]
        return namespace(view.q).concatenate([*robot, self.task.observe(view)], 1)

    def judge(self, view: View) -> tuple[Floats, Flags, dict[str, Floats]]:
        """Reward [n], end of the episode [n] and log: success gives 1, shaped terms up to 0.1."""
        task = self.task
        xp = namespace(view.width)
        success = task.success(view)
        lost = task.lost(view) & ~success
        terms = {name: term(view) for name, term in task.terms.items()}
        if self.worth == "sparse":
            reward = success * xp.ones_like(view.width)
        else:
            reward = sum(task.weights[name] * value for name, value in terms.items())
            reward = xp.where(success, 1.0, reward / 10)
        log = {"success": success, "lost": lost, **{f"term/{k}": v for k, v in terms.items()}}
        return reward, success | lost, log


class RenderScene:
    """The render scene, compiled on first use: with every mesh ("full"), or with collision boxes,
    no arm and no shadows ("light": 0.3 ms per image in software rendering instead of 200).
    """

    def __init__(self, task: Task, meshes: bool = True) -> None:
        self.task = task
        self.meshes = meshes
        self._made: tuple[mujoco.MjModel, mujoco.MjData] | None = None

    def shaped(self, param: Params) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """Model and data of one env with the parameters [1] (numpy); the caller sets the state."""
        if self._made is None:
            model = compile_scene(self.task, pictures=self.meshes)
            if not self.meshes:
                model.geom_group[:] = 0  # the solids of the hand are not drawn otherwise
                model.vis.headlight.ambient[:] = 0.5
                model.vis.headlight.diffuse[:] = 0.5
            self._made = model, mujoco.MjData(model)
        model, data = self._made
        for (name, geom), value in self.task.shape(param).items():
            getattr(model, name)[model.geom(geom).id] = value[0]
        return model, data


def addresses(model: mujoco.MjModel, task: Task) -> dict[str, int]:
    """The index in qpos at which the position of each free body of `task` begins."""
    return {name: int(model.joint(name).qposadr[0]) for name in task.free}


def mocaps(model: mujoco.MjModel, task: Task) -> dict[str, int]:
    """The index of each marker of `task` in mocap_pos."""
    return {name: int(model.body(name).mocapid[0]) for name in task.markers}


def _parameters_in_ranges(task: Task, ranges: Ranges) -> tuple[Parameter, ...]:
    known = [parameter.name for parameter in task.parameters]
    for key in ranges:
        if key not in known:
            name = type(task).__name__.lower()
            raise ValueError(f"ranges: {name} has no parameter {key!r}; it has {known}")
    return tuple(
        Parameter(each.name, *ranges.get(each.name, (each.low, each.high)), each.unit)
        for each in task.parameters
    )
