"""MuJoCo model of the FR3 on its table: a light version for physics, a full one for rendering."""

from __future__ import annotations

import mujoco

from embodied.embodiments import fr3
from embodied.envs.fr3.tasks.task import Task
from embodied.envs.mujoco.cameras import Point, looking

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
    _cameras(spec, task)
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


def _cameras(spec: mujoco.MjSpec, task: Task) -> None:
    place, target, fovy = task.front
    front = looking(place, target, (0.0, 0.0, 1.0))
    spec.worldbody.add_camera(name="front", pos=place, quat=front, fovy=fovy)
    # On the hand, looking down past the fingers, which are at the lower edge of the image.
    place = (0.085, 0.0, 0.01)
    wrist = looking(place, (0.035, 0.0, 0.14), (1.0, 0.0, 0.0))
    spec.body("hand").add_camera(name="wrist", pos=place, quat=wrist, fovy=75)
