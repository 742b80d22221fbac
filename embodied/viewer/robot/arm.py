"""The arm of a deployment in 3D: put where it was measured, and where the policy's plan leads.

The plan is followed in thought: the robot's own controller turns its actions into joint targets,
one after the other, and the kinematics say where the tool would be. Safety is not asked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import torch

from embodied.core.build import Node, build, resolve
from embodied.viewer.scene.decimate import LightLook
from embodied.viewer.scene.mujoco import MujocoLook
from embodied.viewer.scene.pose_from_obs import HINGE, Posed
from embodied.viewer.scene.types import Array
from envs.fr3.scene import compile_scene
from envs.hardware_sim.fr3_task import Wired
from real_robot.control.arm_state import Floats
from real_robot.control.chunk_follower import Controller
from real_robot.deployment import Deployment
from real_robot.policy.observer import APART, AXES, names_of

PLACE = re.compile(r"(.+)_x")
OF_THE_ARM = ("tool", "lead")


class DeployedArm:
    """The model of a deployment's arm, and of what stands before it; `look` draws it, None where
    no model of this arm is known (then `lacks` says so). `marks` are places that are known by name
    and are no body of the model."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment, self.look, self.lacks = deployment, None, ""
        known = names_of(deployment.joints, deployment.given, deployment.sensed)
        self.where = {name: at for at, name in enumerate(known)}
        self.forward, self.controller = deployment.forward(), build(deployment.controller)
        model = model_of(deployment)
        bodies: set[str] = set()
        if model is None or int((model.jnt_type == HINGE).sum()) != deployment.joints:
            self.lacks = f"there is no model of {deployment.robot} to draw: its tool only"
        else:
            bodies = {model.body(i).name for i in range(model.nbody)}
            posed = Posed(model, mujoco.MjData(model), "state", self.where)
            mujoco.mj_forward(model, posed.data)
            self.posed = posed
            self.look = LightLook(MujocoLook(lambda: (posed.model, posed.data)))
        self.marks = [name for name in places_in(self.where) if name not in bodies]

    def put(self, state: np.void) -> dict[str, Array]:
        """Where the arm was measured, and things were sensed; the places of `marks` [3] (m)."""
        given = self.deployment.given
        known = {f"q{i}": float(value) for i, value in enumerate(state["q"], 1)}
        known |= dict(zip(self.deployment.sensed, map(float, state["sensed"]), strict=True))
        known |= {"width": float(state["width"]), **given}
        values = torch.tensor([known.get(name, 0.0) for name in self.where], dtype=torch.float64)
        if self.look is not None and bool(torch.isfinite(values).all()):
            self.posed.put({"state": values})
        at = {name: np.array([known[f"{name}_{axis}"] for axis in AXES]) for name in self.marks}
        return {name: place for name, place in at.items() if np.isfinite(place).all()}

    def tool(self, state: np.void) -> Floats:
        """Where it is [3] (m)."""
        return np.asarray(self.forward(np.asarray(state["q"])[None])[0])

    def plan(self, state: np.void, chunk: np.void | None) -> Array | None:
        """The tool's path [K, 3] (m) from where it is through what the policy's newest chunk says
        from now on; None where that says nothing any more."""
        if chunk is None:
            return None
        path = led(self.controller, self.deployment.step, state, chunk)
        if path is None:
            return None
        places = np.asarray(self.forward(path))
        return places if np.isfinite(places).all() else None


def led(controller: Controller, step: float, state: np.void, chunk: np.void) -> Floats | None:
    """Joint positions [K, n]: those that were measured, then the targets of a chunk's actions
    after the state's time; None where it has none, or not numbers."""
    steps, size = int(chunk["steps"]), int(chunk["size"])
    at = max(0, int((float(state["now"]) - float(chunk["start"])) / step))
    # As the arm's follower does, the last action goes on for a step.
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
    """Of the world that plays the robot, where one does, else of the arm alone, by the module of
    its kinematics; None where that has no `mjcf`."""
    world = world_of(deployment)
    if world is not None:
        made: Any = build(world)
        # A world in motion is compiled without what is only to be looked at.
        return (
            compile_scene(made.task, pictures=True) if isinstance(made, Wired) else made.compile()
        )
    module = sys.modules[resolve(deployment.kinematics).__module__]
    source = module.mjcf() if hasattr(module, "mjcf") else None
    if source is None:
        return None
    if isinstance(source, Path):
        spec = mujoco.MjSpec.from_file(str(source))
        spec.meshdir = str(source.parent / "meshes")
        return spec.compile()
    return mujoco.MjModel.from_xml_string(source)


def world_of(deployment: Deployment) -> Node | None:
    """The node of the world that a simulation, or what plays the robot, has."""
    nodes = (deployment.driver, deployment.emulator or {})
    return next((dict(node["world"]) for node in nodes if node.get("world")), None)


def places_in(where: Mapping[str, int]) -> list[str]:
    """Names of things whose x, y and z are known."""
    found = [match[1] for name in where if (match := PLACE.fullmatch(name))]
    return [
        name
        for name in found
        if name not in OF_THE_ARM
        and not APART.fullmatch(f"{name}_x")
        and all(f"{name}_{axis}" in where for axis in AXES)
    ]
