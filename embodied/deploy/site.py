"""Builds one Deployment from a robot's YAML, a policy and, where there is one, an emulator."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from embodied.core import checkpoint
from embodied.core.affine import Affine
from embodied.core.build import ConfigError, Node, build, named_function
from embodied.core.config_fields import complete
from embodied.core.files import read_json
from embodied.core.policy import Policy
from embodied.core.saved_node import read_run_settings
from embodied.core.spec import Leaf, Spec, hidden
from embodied.datasets.mapping import Mapping
from embodied.embodiments.controller import Controller
from embodied.embodiments.joint_position import JointPosition
from embodied.embodiments.named_controllers import arm_of_kinematics
from embodied.policies.remote.address import PACKAGE, is_address, remote_policy
from embodied.policies.wrappers.translated import Mapped, with_task
from embodied.real_robot.deployment import (
    TARGET,
    Deployment,
    Onboard,
    controller_settings,
    with_allowed,
)
from embodied.real_robot.drivers.driver import Driver, Outside, in_degrees
from embodied.real_robot.emulators.process import Emulator
from embodied.real_robot.policy.observer import names_of

AS_TRAINED = "as_trained"


@dataclass(frozen=True)
class Site:
    """What is deployed, and the run.yaml that it was trained with (None: not known)."""

    deployment: Deployment
    trained: Node | None
    simulated: bool  # whether the robot is simulated or emulated
    behind: Callable[[], float] = lambda: 0.0
    """s that the simulated robot has lost to real time so far. DriverError."""


def robot_of(node: Node) -> Node:
    """The robot's settings of a composed `deploy` node, with the packages that are allowed."""
    robot = controller_settings(node["robot"])
    if robot.pop("_target_", "") != TARGET:
        raise ConfigError(f"a robot's YAML begins with _target_: {TARGET}")
    return with_allowed(robot)


@contextmanager
def site(node: Node, policy: str | None, output: Path) -> Iterator[Site]:
    """The site of a composed `deploy` node, with its emulator running; ConfigError.

    Without `policy`, the script `node["demonstrator"]` is saved as a policy below `output`, and so
    is the address of a policy server (ws://HOST:PORT), which the robot's policy process asks.
    """
    robot = robot_of(node)
    served = is_address(policy)
    task: str | None = node.get("task")
    if policy is not None and served:
        # Not for policies that are loaded later: those are files, and reach no address.
        robot["allow"] = [each for each in robot["allow"] if each.rstrip(".") != PACKAGE]
        # A checkpoint with the spec of the served policy and without any weights.
        folder = output / "policy" / "checkpoints" / "00000000"
        prompt: dict[str, Any] = {} if task is None else {"prompt": task}
        policy = str(checkpoint.save(folder, remote_policy(policy, wait=0.0, **prompt), 0))
    script: Node = {"env": node.get("demonstrator")}
    trained = script if policy is None else trained_with(Path(policy))
    robot = as_trained(robot, trained)
    # Check all settings before anything starts.
    onboard = Deployment.parse({**robot, "policy": ""}).onboard
    if policy is not None:
        policy = policy if served else told_checkpoint(Path(policy), task, output)
        robot, found = fitted(Path(policy), node.get("mapping"), robot, output)
        if found != str(Path(policy)):
            trained = None  # its environment has other names
        policy = found
    if policy is not None and onboard is not None:
        act = read_json(checkpoint.find(Path(policy)) / "spec.json")["act"]
        if tuple(act.get("names") or ()) == onboard.names:
            robot = _with_onboard_policy(onboard, robot, policy, output)
            node, policy, trained = {**node, "demonstrator": onboard.setpoints}, None, script
    with emulated(robot) as (robot, emulator):
        driver = build(robot["driver"], Driver)
        if policy is None:
            policy = _scripted(node, robot, output)
        made = Deployment.parse({**robot, "policy": str(Path(policy).resolve()), "served": served})
        trained = None if trained is script else trained
        if emulator is None:
            yield Site(made, trained, hasattr(driver, "world"))
        else:
            yield Site(made, trained, True, emulator.behind)


@contextmanager
def emulated(robot: Node) -> Iterator[tuple[Node, Emulator | None]]:
    """`robot` with its emulator running, where it has one, with what the driver has to know of it,
    and with the names of what the driver senses. DriverError, ConfigError."""
    emulator = build(robot["emulator"], Emulator) if robot.get("emulator") else None
    try:
        began = {} if emulator is None else emulator.start()
        driver = {**robot["driver"], **began}
        yield {**robot, "driver": driver, "sensed": list(build(driver, Driver).sensed)}, emulator
    finally:
        if emulator is not None:
            emulator.stop()


def _with_onboard_policy(onboard: Onboard, robot: Node, policy: str, output: Path) -> Node:
    """`robot` with that policy on its own computer (where a emulator plays it, on that)."""
    folder, export = output / "onboard", named_function(onboard.export, "onboard export")
    made = {**robot, "driver": {**robot["driver"], **export(Path(policy), folder)}}
    made["onboard"] = {**robot["onboard"], "policy": str(Path(policy).resolve())}
    if robot.get("emulator"):
        made["emulator"] = {**robot["emulator"], "onboard": str(folder.resolve())}
    return made


def trained_with(policy: Path) -> Node | None:
    """The run.yaml of the policy's run; None where there is none, or no environment in it."""
    file = checkpoint.find(policy).parent.parent / "run.yaml"
    node = read_run_settings(file) if file.exists() else {}
    return node if node.get("env") else None


def as_trained(robot: Node, trained: Node | None) -> Node:
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
    env: abc.Mapping[str, Any] = (trained or {}).get("env") or {}
    # Wrappers around the environment, and a robot around the one whose Spec it has.
    while isinstance(inner := env.get("env") or env.get("world"), abc.Mapping):
        env = inner
    env = complete(dict(env))  # the task may be the class's default
    if not isinstance(env.get("task"), str):
        raise ConfigError(
            f"the task of the simulated robot is not known; name it: robot.{part}.world.task=reach "
            "(or lift, push, insert)"
        )
    return {"task": env["task"], "ranges": dict(env.get("ranges") or {})}


def _scripted(node: Node, robot: Node, output: Path) -> str:
    """A checkpoint of the demonstrator, for this robot's observations and actions."""
    controller = build(robot["controller"], Controller)
    # All observations that the robot can provide, by name.
    names = names_of(len(robot["limits"]["low"]), robot.get("given") or {}, robot["sensed"])
    act = Leaf((len(controller.names),), low=-1.0, high=1.0, names=tuple(controller.names))
    obs = {"state": Leaf((len(names),), names=names)}
    spec = Spec(obs=obs, act=act, dt=robot["step"], text=node.get("task") or "")
    policy = build(node["demonstrator"], Policy, spec=spec)
    return str(checkpoint.save(output / "policy" / "checkpoints" / "00000000", policy, 0))


OPENING = 0.08  # m, of a hand whose driver does not say how far it opens


def opening_of(robot: Node) -> float:
    """How far the hand opens, m; 0 without a hand."""
    hand: Any = robot["driver"].get("hand")
    if isinstance(hand, abc.Mapping) and "width" in hand:
        return float(cast(Node, hand)["width"])
    return OPENING if robot.get("home_width") is not None else 0.0


def outside_of(robot: Node) -> Outside:
    """What programs outside call what the robot measures and takes: its driver's own names and
    units, else joints in degrees and a hand from 0 to 100. ConfigError."""
    driver = build(robot["driver"], Driver)
    return driver.outside() or in_degrees(driver.joints, opening_of(robot))


def fitted(policy: Path, file: str | None, robot: Node, output: Path) -> tuple[Node, str]:
    """The settings `robot` and the checkpoint of the run `policy` that fit each other: joined by
    the mapping `file`, where there is one, and by the names of what the robot measures and takes.
    ConfigError where they do not fit, in one line."""
    spec = checkpoint.load_spec(policy)
    mapping = Mapping() if file is None else Mapping.load(file)
    unmapped = isinstance(mapping.action, str) and not mapping.action_elements
    native = unmapped and _names_joints(spec, robot)
    if native:
        robot = _in_outside_units(robot, outside_of(robot), spec.dt)
    controller = build(robot["controller"], Controller)
    names = tuple(controller.names)
    reordered = sorted(spec.act.names) == sorted(names) and spec.act.names != names
    if file is None and not reordered and (not native or spec.act.names):
        return robot, str(policy)
    if file is None or (controller.physical and isinstance(mapping.action, str)):
        ends = (1.0,) * spec.act.size  # its numbers are taken as they are
        mapping = replace(mapping, action=Affine(tuple(-end for end in ends), ends))
    base = checkpoint.load_policy(policy)
    mapped = Mapped.of(base, robot_spec(base.spec, mapping, robot, file or "mapping"), mapping)
    return robot, str(checkpoint.save(output / "policy" / "checkpoints" / "00000000", mapped, 0))


def _names_joints(spec: Spec, robot: Node) -> bool:
    """Whether the policy acts in the driver's own names and units, or in as many without names."""
    joints, act = len(robot["limits"]["low"]), spec.act
    if act.is_unit or act.dtype != "float32" or not joints <= act.size <= joints + 1:
        return False
    if build(robot["controller"], Controller).physical:
        return False  # the robot's settings say what physical actions are
    names = outside_of(robot).names
    return sorted(act.names) == sorted(names) or (not act.names and act.size == len(names))


def _in_outside_units(robot: Node, outside: Outside, dt: float) -> Node:
    """`robot` at the rate of a policy that acts in the driver's own names and units, with a
    controller of joint positions in them, and with these names for its observations."""
    n = outside.joints
    controller: Node = {
        "_target_": f"{JointPosition.__module__}.{JointPosition.__qualname__}",
        "arm": arm_of_kinematics(robot["kinematics"]),
        "dt": dt,
        "action": "deg",
        "zero": list(outside.zero[:n]),
        "unit": list(outside.unit[:n]),
        "keys": list(outside.names),
    }
    if outside.hand:  # 0 and 1 m: of the line through both, what the hand can do is taken
        closed, unit = outside.zero[-1], outside.unit[-1]
        controller |= {"hand_values": [closed, closed + 1 / unit], "width": [0.0, 1.0]}
    return {**robot, "controller": controller, "step": dt, "outside": asdict(outside)}


def told_checkpoint(policy: Path, task: str | None, output: Path) -> str:
    """The checkpoint of the run `policy`, which does `task`: one below `output` where the run has
    several. ConfigError for a task that it does not know, in one line that lists them."""
    if task is None and not checkpoint.load_spec(policy).listens:
        return str(policy)
    base = checkpoint.load_policy(policy)
    told = with_task(base, task)
    if told is base:
        return str(policy)
    return str(checkpoint.save(output / "told" / "checkpoints" / "00000000", told, 0))


def robot_spec(there: Spec, mapping: Mapping, robot: Node, where: str) -> Spec:
    """What the policy of `there` needs of a robot, in the robot's names and at its rate."""
    controller = build(robot["controller"], Controller)
    names = tuple(controller.names)
    here = {source.name: name for name, source in mapping.obs.items()}
    outside = tuple((robot.get("outside") or {}).get("names", ()))
    obs: dict[str, Leaf] = {}
    for name, leaf in there.obs.items():
        if hidden(name):
            continue
        ours = here.get(name, name)
        if leaf.is_picture:
            obs[ours] = Leaf(leaf.shape, leaf.dtype, unit=leaf.unit)
            continue
        elements = mapping.source(ours).elements or leaf.names
        if not elements and leaf.size == len(outside):
            elements = outside  # without any names, those of the driver in its order
        if len(elements) != leaf.size:
            raise ConfigError(
                f"{where}: obs.{ours} needs the robot's names of its {leaf.size} elements "
                f"({', '.join(leaf.names) or name}): {{name: {name}, elements: [q1, ...]}}"
            )
        obs[ours] = Leaf(leaf.shape, names=tuple(elements))
    low, high = (None, None) if controller.physical else (-1.0, 1.0)
    act = Leaf((len(names),), low=low, high=high, names=names)
    return Spec(obs, act, dt=robot["step"], text=there.text)
