"""Describe an arm: an arm file and a first robot YAML from an MJCF or URDF file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml

from embodied.core.bounds import Bound, Count, Number, Positive
from embodied.core.build import ConfigError
from embodied.embodiments.kinematics.arm import ArmFile
from embodied.embodiments.kinematics.chain import Chain, Frame
from embodied.embodiments.kinematics.from_mujoco import (
    compile_spec,
    find_route,
    read_arm,
    read_hand,
    read_spec,
)

SAMPLES = 4000  # poses that the box of the tool is found with
TABLE = 0.02  # m above the base: the lowest that the tool of a first robot YAML goes
MARGIN = 0.05  # rad, m: kept from the joint limits
HAND_FORCE = 20.0  # N: largest force of a hand, to begin with
FORCE = 60.0  # N on the tool of a simulated arm
TOOL_SPEED = 0.5  # m/s


@dataclass(frozen=True)
class Config:
    """Settings of `embodied robot describe FILE`."""

    out: str  # arm file to write
    base: str | None = None  # body that the arm stands on; null: what its first joint is on
    tip: str | None = None  # site or body of the tool; null: the end, where there is only one
    offset: tuple[Number, Number, Number] = (0.0, 0.0, 0.0)  # of the tool from the tip, m
    home: tuple[Number, ...] | None = None  # joint positions [n], rad (m); null: the file's
    velocity: Positive | tuple[Positive, ...] | None = None  # rad/s (m/s), where the file has none
    hand: tuple[str, ...] = ()  # joints of the gripper
    open: Annotated[float, Bound(above=0.0, high=1.0)] | None = None  # opening of the gripper, m
    meshes: str | None = None  # folder of the mesh files; null: as the file says
    capsules: bool = True  # whether to fit capsules to the arm's shape
    poses: Count = 3000  # random poses that are searched for parts that come near each other
    robot: str | None = None  # NAME_sim.yaml: robot YAML of a simulation to write too; null: none
    driver: str | None = None  # your driver's class (my_lab.my_arm.MyArm): writes NAME.yaml too

    def __post_init__(self) -> None:
        if self.driver is not None and not (self.robot or "").endswith("_sim.yaml"):
            raise ConfigError(
                "driver=... writes NAME.yaml beside robot=.../NAME_sim.yaml: add robot=, with a "
                "name that ends in _sim.yaml"
            )


def describe(path: Path, config: Config) -> ArmFile:
    """The arm in the file `path`. ConfigError says what to type."""
    from embodied.real_robot.safety.fit_capsules import fit_model, shapes

    mj = compile_spec(read_spec(path, config.meshes), path)
    route = find_route(mj, config.base, config.tip)
    hand = read_hand(path, mj, config.hand, config.open) if config.hand else None
    speed = config.velocity
    velocity = [speed] if isinstance(speed, float | int) else speed
    table = read_arm(path, mj, route, config.home, velocity, hand)
    turn = table.tool.turn
    moved = np.array(table.tool.place) + np.reshape(turn, (3, 3)) @ np.array(config.offset)
    place = (float(moved[0]), float(moved[1]), float(moved[2]))
    table = replace(table, tool=Frame(place, turn))
    if not config.capsules:
        return table
    parts = shapes(fit_model(mj, route.joints, route.base, config.poses))
    return replace(table, bodies=parts["bodies"], pairs=parts["pairs"])


def summary(table: ArmFile) -> list[str]:
    """What was found, for people: one line a joint, the tool at home, the capsules."""
    place = Chain(table.joints, table.tool)(np.array([table.home]))[0][0]
    lines = [f"{table.name}: {len(table.joints)} joints from {table.base} to {table.tip}"]
    rows = zip(
        table.joints, table.limits.low, table.limits.high, table.limits.velocity,
        table.limits.effort, table.home, strict=True,
    )  # fmt: skip
    for joint, low, high, velocity, effort, home in rows:
        unit, force = ("m", "N") if joint.slides else ("rad", "N m")
        most = f"{effort:g} {force}" if effort else f"? {force}"
        lines.append(
            f"  {joint.name:20} {low:7.3f} to {high:6.3f} {unit}, {velocity:g} {unit}/s, {most}, "
            f"home {home:.3f}"
        )
    lines.append(f"  the tool at home is at {', '.join(f'{each:.3f}' for each in place)} m")
    count = sum(len(body["capsules"]) for body in table.bodies)
    lines.append(f"  {count} capsules of {len(table.bodies)} bodies, {len(table.pairs)} pairs")
    return lines


def robot_yaml(table: ArmFile, path: Path, config: Config, own: str | None = None) -> str:
    """A robot's YAML for a simulation of `path`, or for the driver class `own`. The velocity limit
    is half of the arm's own; what the file does not say is `???`, and does not start."""
    low, high = _reach(table)
    arm, n = str(Path(config.out).resolve()), len(table.joints)
    driver: dict[str, Any] = {"_target_": own}
    if own is None:
        simulation = "embodied.real_robot.drivers.mujoco_arm.MujocoArm"
        meshes = {} if config.meshes is None else {"meshes": str(Path(config.meshes).resolve())}
        driver = {"_target_": simulation, "file": str(path.resolve()), "arm": arm, **meshes}
    action = "embodied.embodiments.cartesian_delta.CartesianDelta"
    weight = {"weight": 0.1} if n < 6 else {}
    limits = table.limits
    node: dict[str, Any] = {
        "_target_": "embodied.real_robot.deployment.Deployment",
        "robot": table.name,
        "driver": driver,
        "controller": {"_target_": action, "arm": arm, "low": low, "high": high, **weight},
        "kinematics": arm,
        "hertz": 100,
        "step": 0.05,
        "home": _floats(table.home),
        "given": {"goal_x": 0.0, "goal_y": 0.0, "goal_z": 0.0},
        "goal_within": 0.02,
        "limits": {
            "low": _floats(limits.low),
            "high": _floats(limits.high),
            "margin": [MARGIN] * n,
            "velocity": _floats(0.5 * np.array(limits.velocity)),
            "acceleration": [5.0] * n,
            "jerk": [200.0] * n,
            "torque": _floats(limits.effort) if min(limits.effort) > 0 else "???",
            "tracking": [0.3] * n,
        },
        "fresh": {"hold": 0.25, "stop": 1.0, "state": 0.25},
        # A JointDriver measures no force; the simulation does.
        "force": FORCE if own is None else "unmeasured",
        "tool_speed": TOOL_SPEED,
        "workspace": {"low": [*low], "high": [*high]},
    }
    # A place near the tool's at home, for a first motion.
    place = Chain(table.joints, table.tool)(np.array([table.home]))[0][0]
    goal = _floats(np.clip(0.8 * place, np.array(low) + TABLE, np.array(high) - TABLE))
    node["given"] = dict(zip(node["given"], goal, strict=True))
    if table.hand is not None:
        hand = table.hand
        node["home_width"] = hand.open
        most = {"high": hand.open, "speed": hand.speed, "force": HAND_FORCE}
        node["hand"] = {**most, "at_stop": "hold"}
    if table.bodies:
        # A table at z = 0 that whatever stays with the base may touch.
        still = [body["name"] for body in table.bodies if body["joint"] <= 0]
        node["geometry"] = {"model": arm, "planes": [{"plane": [0, 0, 1, 0.0], "exempt": still}]}
    what = f"simulated from {path.name}" if own is None else f"through {own}"
    head = f"# {table.name}, {what}: docs/own_robot.md\n"
    return head + yaml.safe_dump(node, sort_keys=False, default_flow_style=None, width=99)


def _reach(table: ArmFile) -> tuple[list[float], list[float]]:
    """The box of the tool in random poses, above the table."""
    low, high = np.array(table.limits.low), np.array(table.limits.high)
    q = np.random.default_rng(0).uniform(low, high, (SAMPLES, len(low)))
    places = Chain(table.joints, table.tool)(q)[0]
    bottom, top = places.min(0), places.max(0)
    bottom[2] = max(bottom[2], TABLE)
    if bottom[2] >= top[2]:
        raise ConfigError("the tool is never above its base's z = 0; name another base=")
    return _floats(bottom), _floats(top)


def _floats(values: Any) -> list[float]:
    return [round(float(value), 6) + 0.0 for value in values]
