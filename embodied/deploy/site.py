"""Builds one Deployment from a robot's YAML, a policy and, where there is one, an emulator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from embodied.core.build import ConfigError, Node, build, resolve
from real_robot.deployment import TARGET, Deployment, Onboard, renamed_settings

AS_TRAINED = "as_trained"


@dataclass(frozen=True)
class Site:
    """What is deployed, and the run.yaml that it was trained with (None: not known)."""

    deployment: Deployment
    trained: Node | None
    simulated: bool
    """Whether the robot is simulated or emulated."""
    behind: Callable[[], float] = lambda: 0.0
    """s that the simulated robot has lost to real time so far. DriverError."""


@contextmanager
def site(node: Node, policy: str | None, output: Path) -> Iterator[Site]:
    """The site of a composed `deploy` node, with its emulator running; ConfigError.

    Without `policy`, the script `node["demonstrator"]` is saved as a policy below `output`.
    """
    robot = renamed_settings(node["robot"])
    if robot.pop("_target_", "") != TARGET:
        raise ConfigError(f"a robot's YAML begins with _target_: {TARGET}")
    script: Node = {"env": node.get("demonstrator")}
    trained = script if policy is None else trained_with(Path(policy))
    robot = _as_trained(robot, trained)
    # Check all settings before anything starts.
    onboard = Deployment.parse({**robot, "policy": ""}).onboard
    if policy is not None and onboard is not None and _action_names(policy) == onboard.names:
        robot = _with_onboard_policy(onboard, robot, policy, output)
        node, policy, trained = {**node, "demonstrator": onboard.setpoints}, None, script
    emulator: Any = build(robot["emulator"]) if robot.get("emulator") else None
    try:
        if emulator is not None:
            robot["driver"] = {**robot["driver"], **emulator.start()}
        driver = build(robot["driver"])
        robot["sensed"] = list(driver.sensed)
        if policy is None:
            policy = _scripted(node, robot, output)
        made = Deployment.parse({**robot, "policy": str(Path(policy).resolve())})
        trained = None if trained is script else trained
        if emulator is None:
            yield Site(made, trained, hasattr(driver, "world"))
        else:
            yield Site(made, trained, True, emulator.behind)
    finally:
        if emulator is not None:
            emulator.stop()


def _action_names(policy: str) -> tuple[str, ...]:
    """The names of the policy's actions."""
    from embodied.core import checkpoint

    act = json.loads((checkpoint.find(Path(policy)) / "spec.json").read_text())["act"]
    return tuple(act.get("names") or ())


def _with_onboard_policy(onboard: Onboard, robot: Node, policy: str, output: Path) -> Node:
    """`robot` with that policy on its own computer (where a emulator plays it, on that)."""
    folder, export = output / "onboard", resolve(onboard.export)
    made = {**robot, "driver": {**robot["driver"], **export(Path(policy), folder)}}
    made["onboard"] = {**robot["onboard"], "policy": str(Path(policy).resolve())}
    if robot.get("emulator"):
        made["emulator"] = {**robot["emulator"], "onboard": str(folder.resolve())}
    return made


def trained_with(policy: Path) -> Node | None:
    """The run.yaml of the run that the policy comes from; None where there is none."""
    from embodied.core import checkpoint

    file = checkpoint.find(policy).parent.parent / "run.yaml"
    return yaml.safe_load(file.read_text()) if file.exists() else None


def _as_trained(robot: Node, trained: Node | None) -> Node:
    """Replace the task "as_trained" by the task and ranges of the policy's run; ranges that the
    robot's own settings name take precedence."""
    made = dict(robot)
    for part in ("driver", "emulator"):
        world = (made.get(part) or {}).get("world")
        if world and world.get("task") == AS_TRAINED:
            task = _task_of(trained, part)
            ranges = {**task["ranges"], **(world.get("ranges") or {})}
            made[part] = {**made[part], "world": {**world, **task, "ranges": ranges}}
    return made


def _task_of(trained: Node | None, part: str) -> Node:
    env: Mapping[str, Any] = (trained or {}).get("env") or {}
    while isinstance(env.get("env"), Mapping):  # wrappers around the environment
        env = env["env"]
    if not isinstance(env.get("task"), str):
        raise ConfigError(
            f"the task of the simulated robot is not known; name it: robot.{part}.world.task=reach "
            "(or lift, push, insert)"
        )
    return {"task": env["task"], "ranges": dict(env.get("ranges") or {})}


def _scripted(node: Node, robot: Node, output: Path) -> str:
    """A checkpoint of the demonstrator, for this robot's observations and actions."""
    from embodied.core.checkpoint import save
    from embodied.core.spec import Leaf, Spec
    from real_robot.policy.observer import names_of

    controller: Any = build(robot["controller"])
    # All observations that the robot can provide, by name.
    names = names_of(len(robot["limits"]["low"]), robot.get("given") or {}, robot["sensed"])
    act = Leaf((len(controller.names),), low=-1.0, high=1.0, names=tuple(controller.names))
    spec = Spec(obs={"state": Leaf((len(names),), names=names)}, act=act, dt=robot["step"])
    policy = build(node["demonstrator"], spec=spec)
    return str(save(output / "policy" / "checkpoints" / "00000000", policy, 0))
