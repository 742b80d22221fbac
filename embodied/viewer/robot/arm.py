"""RobotArm: the 3D model of a deployed arm at its measured joints, and the tool path of its plan.

The plan is the newest action chunk, converted to joint targets by the robot's controller, and to
tool positions by its kinematics. Safety stages are not applied.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import mujoco
import numpy as np
import torch

from embodied.core.build import build, named_function
from embodied.embodiments.controller import Controller
from embodied.embodiments.kinematics.arm import is_arm_file
from embodied.embodiments.kinematics.from_mujoco import compile_spec, read_spec
from embodied.envs.fr3.base import compile_scene
from embodied.envs.hardware_sim.fr3_task import TaskWorld
from embodied.real_robot.assemble import forward_kinematics
from embodied.real_robot.control.arm_state import Floats
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.sim import World
from embodied.real_robot.policy.observer import APART, AXES, names_of
from embodied.viewer.scene.decimate import DecimatedScene
from embodied.viewer.scene.mujoco import MujocoScene
from embodied.viewer.scene.pose_from_obs import HINGE, PosedModel
from embodied.viewer.scene.types import Array

PLACE = re.compile(r"(.+)_x")
ARM_NAMES = ("tool", "lead")


class RobotArm:
    """The model of a deployment's arm and of the objects before it.

    `model` is None if no 3D model of this arm is known; `missing` says so. `marks` are named
    positions that are not bodies of the model.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment, self.model, self.missing = deployment, None, ""
        known = names_of(deployment.joints, deployment.given, deployment.sensed)
        self.where = {name: at for at, name in enumerate(known)}
        self.forward = forward_kinematics(deployment)
        self.controller = build(deployment.controller, Controller)
        model = model_of(deployment)
        bodies: set[str] = set()
        if model is None or int((model.jnt_type == HINGE).sum()) != deployment.joints:
            self.missing = f"no model of {deployment.robot}; only its tool position is shown"
        else:
            bodies = {model.body(i).name for i in range(model.nbody)}
            posed = PosedModel(model, mujoco.MjData(model), "state", self.where)
            mujoco.mj_forward(model, posed.data)
            self.posed = posed
            self.model = DecimatedScene(MujocoScene(lambda: (posed.model, posed.data)))
        self.marks = [name for name in places_in(self.where) if name not in bodies]

    def put(self, state: np.void) -> dict[str, Array]:
        """Pose the model by the measured state; returns the positions of `marks`, [3] each (m)."""
        given = self.deployment.given
        known = {f"q{i}": float(value) for i, value in enumerate(state["q"], 1)}
        known |= dict(zip(self.deployment.sensed, map(float, state["sensed"]), strict=True))
        known |= {"width": float(state["width"]), **given}
        values = torch.tensor([known.get(name, 0.0) for name in self.where], dtype=torch.float64)
        if self.model is not None and bool(torch.isfinite(values).all()):
            self.posed.put({"state": values})
        at = {name: np.array([known[f"{name}_{axis}"] for axis in AXES]) for name in self.marks}
        return {name: place for name, place in at.items() if np.isfinite(place).all()}

    def tool(self, state: np.void) -> Floats:
        """The tool position [3] (m)."""
        return np.asarray(self.forward(np.asarray(state["q"])[None])[0])

    def plan(self, state: np.void, chunk: np.void | None) -> Array | None:
        """The tool path [K, 3] (m) from the measured pose through the remaining actions of the
        newest chunk; None if no actions remain."""
        if chunk is None:
            return None
        path = plan_joints(self.controller, self.deployment.step, state, chunk)
        if path is None:
            return None
        places = np.asarray(self.forward(path))
        return places if np.isfinite(places).all() else None


def plan_joints(
    controller: Controller, step: float, state: np.void, chunk: np.void
) -> Floats | None:
    """Joint positions [K, n]: the measured ones, then the targets of the chunk's remaining actions;
    None if there are none or they are not finite."""
    steps, size = int(chunk["steps"]), int(chunk["size"])
    at = max(0, int((float(state["now"]) - float(chunk["start"])) / step))
    # The last action is held for one step, as by the chunk follower.
    actions = chunk["actions"][min(at, steps - 1) : steps, :size].astype(np.float64)
    q, sent = (np.array(state[name], np.float64) for name in ("q", "sent"))
    if not steps or at > steps or not all(np.isfinite(each).all() for each in (actions, q, sent)):
        return None
    path, reference = [q], controller.begin(sent[None], np.array([float(state["width"])]))
    for action in actions:
        joints, _, reference = controller(action[None], path[-1][None], reference)
        path.append(joints[0])
    return np.stack(path)


def model_of(deployment: Deployment) -> mujoco.MjModel | None:
    """The MuJoCo model of the deployment's simulator, if there is one, else that of its kinematics
    module's `mjcf()`; None if there is none."""
    parts = (deployment.driver, deployment.emulator or {})
    node = next((dict(part["world"]) for part in parts if part.get("world")), None)
    if node is not None:
        made = build(node, World)
        # The simulation compiles its model without visual geoms.
        return (
            compile_scene(made.task, pictures=True)
            if isinstance(made, TaskWorld)
            else made.compile()
        )
    if is_arm_file(deployment.kinematics):
        file = deployment.driver.get("file")  # of a simulation of the arm's own file
        return None if file is None else compile_spec(read_spec(Path(file)), Path(file))
    module = sys.modules[named_function(deployment.kinematics, "kinematics").__module__]
    source = module.mjcf() if hasattr(module, "mjcf") else None
    if source is None:
        return None
    if isinstance(source, Path):
        spec = mujoco.MjSpec.from_file(str(source))
        spec.meshdir = str(source.parent / "meshes")
        return spec.compile()
    return mujoco.MjModel.from_xml_string(source)


def places_in(where: Mapping[str, int]) -> list[str]:
    """Names of objects whose x, y and z are known."""
    found = [match[1] for name in where if (match := PLACE.fullmatch(name))]
    return [
        name
        for name in found
        if name not in ARM_NAMES
        and not APART.fullmatch(f"{name}_x")
        and all(f"{name}_{axis}" in where for axis in AXES)
    ]
