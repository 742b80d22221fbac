"""Base of the FR3 environments: spec, observation, reward, task parameters and render scene.

Joint parameters, per joint (stiffness, damping, friction, armature):

    tau = stiffness (target - q) - damping dq,   less friction sign(dq);   inertia + armature
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import mujoco
import numpy as np

from embodied.core.bounds import NonNegative, Ranges
from embodied.core.build import ConfigError, nearest
from embodied.core.spec import Leaf, Spec
from embodied.embodiments import fr3
from embodied.embodiments.arrays import Floats, constant, namespace
from embodied.embodiments.controller import Controller
from embodied.envs.fr3.tasks import TASKS
from embodied.envs.fr3.tasks.task import Flags, Parameter, Params, Start, Task, View
from embodied.envs.mujoco.cameras import Point, looking

QUANTITIES = {
    "stiffness": "N m/rad",
    "damping": "N m s/rad",
    "friction": "N m",
    "armature": "kg m2",
}
"""Each has seven values, and its unit. `friction` is that of the joint (Coulomb), `damping` that of
the controller."""
JointValues = tuple[NonNegative, ...]  # one value of each of the seven joints
Arm = Mapping[str, Sequence[float]]


def read_joints(model: mujoco.MjModel) -> dict[str, list[float]]:
    """The joint parameters of `model`."""
    dofs, servos = _addresses(model)
    return {
        "stiffness": model.actuator_gainprm[servos, 0].tolist(),
        "damping": (-model.actuator_biasprm[servos, 2]).tolist(),
        "friction": model.dof_frictionloss[dofs].tolist(),
        "armature": model.dof_armature[dofs].tolist(),
    }


def write_joints(model: mujoco.MjModel, arm: Arm) -> None:
    """Set the joint parameters `arm` in `model`; others stay unchanged. Raises ConfigError."""
    dofs, servos = _addresses(model)
    for name, given in arm.items():
        values = np.asarray(given, np.float64)
        if name not in QUANTITIES:
            raise ConfigError(f'arm: unknown quantity "{name}"{nearest(name, QUANTITIES)}')
        if values.shape != (len(fr3.JOINTS),) or not (values >= 0).all():
            raise ConfigError(f"arm.{name} must be seven numbers of 0 or more, got {given}")
        if name == "stiffness":
            model.actuator_gainprm[servos, 0] = values
            model.actuator_biasprm[servos, 1] = -values
        elif name == "damping":
            model.actuator_biasprm[servos, 2] = -values
        elif name == "friction":
            model.dof_frictionloss[dofs] = values
        else:
            model.dof_armature[dofs] = values
    if "armature" in arm:
        mujoco.mj_setConst(model, mujoco.MjData(model))


def _addresses(model: mujoco.MjModel) -> tuple[list[int], list[int]]:
    dofs = [int(model.joint(name).dofadr[0]) for name in fr3.JOINTS]
    return dofs, [int(model.actuator(name).id) for name in fr3.JOINTS]


# Contact groups: objects and table touch everything, the robot does not touch itself.
OBJECT = 1
ROBOT = 2


def compile_scene(task: Task, pictures: bool) -> mujoco.MjModel:
    """The scene of `task`; both variants have the same state, so rows can be moved across."""
    source = fr3.mjcf()
    spec = mujoco.MjSpec.from_file(str(source))
    spec.meshdir = str(source.parent / "meshes")
    option = spec.option
    option.timestep = task.timestep
    option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    # Firm friction, or held objects creep out of the hand; with only 20 iterations the solver does
    # not get there and 17% of lifts are lost.
    option.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
    option.impratio = 10.0
    option.iterations = 100
    option.ls_iterations = 50
    # Joint impedance with gravity compensation, as the robot's own controller has it.
    for body in spec.bodies:
        body.gravcomp = 1.0 if body.name != "world" else 0.0
    for name, stiffness, damping in zip(fr3.JOINTS, fr3.STIFFNESS, fr3.DAMPING, strict=True):
        # As the real controller, it also compensates joint friction.
        spec.joint(name).frictionloss = 0.0
        actuator = spec.actuator(name)
        actuator.gainprm[0] = stiffness
        actuator.biasprm[1] = -stiffness
        actuator.biasprm[2] = -damping
    _hand(spec)
    for geom in list(spec.geoms):
        if not (pictures and geom.classname.name == "visual"):
            spec.delete(geom)
    if not pictures:
        for mesh in list(spec.meshes):
            spec.delete(mesh)
    for finger in ("left_finger", "right_finger"):
        _solid(spec, finger, (0.0085, 0.00475, 0.0085), (0.0, 0.00475, 0.0445))
    _solid(spec, "hand", (0.03, 0.10, 0.033), (0.0, 0.0, 0.033))
    spec.worldbody.add_geom(
        name="table",
        type=mujoco.mjtGeom.mjGEOM_BOX,
        size=[0.55, 0.6, 0.03],
        pos=[0.4, 0.0, -0.03],
        rgba=[0.66, 0.59, 0.51, 1.0],
        friction=[0.8, 0.005, 0.0001],
    )
    task.edit(spec)
    if pictures:
        _stage(spec)
    place, target, fovy = task.front
    front = looking(place, target, (0.0, 0.0, 1.0))
    spec.worldbody.add_camera(name="front", pos=place, quat=front, fovy=fovy)
    # On the hand, looking down past the fingers, which are at the lower edge of the image.
    place = (0.085, 0.0, 0.01)
    wrist = looking(place, (0.035, 0.0, 0.14), (1.0, 0.0, 0.0))
    spec.body("hand").add_camera(name="wrist", pos=place, quat=wrist, fovy=75)
    for key in spec.keys:
        spec.delete(key)
    return spec.compile()


def _hand(spec: mujoco.MjSpec) -> None:
    """Fingers that close at a real hand's speed, one flat pad each, and a box for the hand."""
    for name in fr3.FINGERS:
        joint = spec.joint(name)
        joint.armature = 0.1
        joint.frictionloss = 0.0
        joint.damping[0] = 10.0
    actuator = spec.actuator("hand")
    actuator.inheritrange = 0
    actuator.gainprm[0] = 6000.0
    actuator.biasprm[1] = -6000.0
    actuator.biasprm[2] = -60.0
    actuator.ctrlrange = [0.0, fr3.OPEN / 2]
    actuator.forcerange = [-70.0, 70.0]


def _solid(spec: mujoco.MjSpec, body: str, half: Point, place: Point) -> None:
    spec.body(body).add_geom(
        name=f"{body}_solid",
        type=mujoco.mjtGeom.mjGEOM_BOX,
        size=half,
        pos=place,
        contype=ROBOT,
        conaffinity=OBJECT,
        group=3,
        mass=0,
        condim=4,
        friction=[1.0, 0.01, 0.001],
    )


def _stage(spec: mujoco.MjSpec) -> None:
    """Floor, table legs, sky and lights: for people only."""
    spec.add_texture(
        name="sky",
        type=mujoco.mjtTexture.mjTEXTURE_SKYBOX,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_GRADIENT,
        rgb1=[0.93, 0.95, 0.97],
        rgb2=[0.70, 0.76, 0.82],
        width=256,
        height=256,
    )
    for x in (-0.10, 0.90):
        for y in (-0.55, 0.55):
            _decoration(spec, (0.03, 0.03, 0.34), (x, y, -0.40), (0.35, 0.36, 0.38, 1))
    _decoration(spec, (3.0, 3.0, 0.01), (0.4, 0.0, -0.75), (0.58, 0.61, 0.64, 1))
    world = spec.worldbody
    world.add_light(pos=[1.2, -1.0, 2.0], dir=[-0.5, 0.6, -1.2], diffuse=[0.6] * 3, castshadow=True)
    world.add_light(pos=[0.0, 1.5, 1.8], dir=[0.3, -0.8, -1.0], diffuse=[0.3] * 3, castshadow=False)
    spec.visual.headlight.ambient = [0.35] * 3
    spec.visual.headlight.diffuse = [0.25] * 3
    spec.visual.headlight.specular = [0.1] * 3
    spec.visual.quality.shadowsize = 4096
    spec.visual.quality.offsamples = 8


def _decoration(
    spec: mujoco.MjSpec, half: Point, place: Point, rgba: tuple[float, float, float, float]
) -> None:
    spec.worldbody.add_geom(
        type=mujoco.mjtGeom.mjGEOM_BOX, size=half, pos=place, rgba=rgba, contype=0, conaffinity=0
    )


ROBOT_NAMES = (
    *(f"q{i}" for i in range(1, 8)),
    *(f"dq{i}" for i in range(1, 8)),
    *(f"tool_{axis}" for axis in "xyz"),
    *(f"lead_{axis}" for axis in "xyz"),
    "width",
)
DT = 0.05
"""s of a control step."""
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

    def spec(self, controller: Controller, robot: tuple[str, ...] = ROBOT_NAMES) -> Spec:
        """The spec of this task for an arm whose own observations are `robot`."""
        names = (*robot, *self.task.names)
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


def without_objects(spec: Spec, robot: tuple[str, ...]) -> Spec:
    """`spec` where policies see the first elements of `state` only, those of the robot."""
    leaf = Leaf((len(robot),), names=robot)
    return spec.with_obs(**{"state": leaf, "privileged/state": spec.obs["state"]})


class RenderScene:
    """The render scene, compiled on first use: with every mesh ("full"), or with collision boxes,
    no arm and no shadows ("light": under 1 ms per image in software rendering; "full": 7 ms per
    observation, 250 ms per image of a film).
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

    def at(self, param: Params, state: Floats) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """As `shaped`, in the physics state (mjSTATE_INTEGRATION) of one env."""
        model, data = self.shaped(param)
        mujoco.mj_setState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION.value)
        mujoco.mj_forward(model, data)
        return model, data


def addresses(model: mujoco.MjModel, task: Task) -> dict[str, int]:
    """The index in qpos at which the position of each free body of `task` begins."""
    return {name: int(model.joint(name).qposadr[0]) for name in task.free}


def mocaps(model: mujoco.MjModel, task: Task) -> dict[str, int]:
    """The index of each marker of `task` in mocap_pos."""
    return {name: int(model.body(name).mocapid[0]) for name in task.markers}


def stand(qpos: Floats, q: Floats, start: Start, free: Mapping[str, int]) -> None:
    """Write arms at the joints `q` [n, 7] and the bodies of `start` into states `qpos` [n, nq]."""
    qpos[:, :7] = q
    qpos[:, 7:9] = start.width[:, None] / 2
    for name, (place, turn) in start.bodies(fr3.forward(q)[0]).items():
        at = free[name]
        qpos[:, at : at + 3] = place
        qpos[:, at + 3 : at + 7] = turn


def view_of(
    qpos: Floats,
    qvel: Floats,
    mocap: Floats,
    free: Mapping[str, int],
    markers: Mapping[str, int],
    wanted: Floats | None,
    param: Params,
    memory: dict[str, Floats],
) -> View:
    """The `View` of states [n, ...]; `wanted` [n, 3] is the commanded tool point (None: not
    known)."""
    tool = fr3.forward(qpos[:, :7])[0]
    place = {name: qpos[:, at : at + 3] for name, at in free.items()}
    place |= {name: mocap[:, at] for name, at in markers.items()}
    return View(
        q=qpos[:, :7],
        dq=qvel[:, :7],
        tool=tool,
        lead=namespace(tool).zeros_like(tool) if wanted is None else wanted - tool,
        width=qpos[:, 7] + qpos[:, 8],
        place=place,
        turn={name: qpos[:, at + 3 : at + 7] for name, at in free.items()},
        param=param,
        memory=memory,
    )


def _parameters_in_ranges(task: Task, ranges: Ranges) -> tuple[Parameter, ...]:
    known = [parameter.name for parameter in task.parameters]
    for key, (low, high) in ranges.items():
        if key not in known:
            name = type(task).__name__.lower()
            near = nearest(key, known)
            raise ConfigError(f"ranges: {name} has no parameter {key!r}{near}; it has {known}")
        if low > high:
            raise ConfigError(f"ranges: {key}=[{low}, {high}] must be [low, high]")
    return tuple(
        Parameter(each.name, *ranges.get(each.name, (each.low, each.high)), each.unit)
        for each in task.parameters
    )
