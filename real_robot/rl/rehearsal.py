"""Rehearsal of a new calibration: one joint after the other turns by 3 degrees and back, and a
person says whether it turned the way that its kinematics say.

Signs and zeros of a calibration are a person's, and a wrong one turns every motion against the
limits that are to hold it. So before anything else moves the arm, each joint is tried alone, behind
the same limits; what was rehearsed is remembered by the hash of the calibration.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.build import ConfigError, Node, build
from embodied.embodiments.kinematics.arm import forward_of, load_arm, read_arms_file
from embodied.embodiments.named_controllers import arm_of_kinematics
from embodied.real_robot.assemble import build_regions
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.messages import Mode
from embodied.real_robot.rl.session import RobotSession
from embodied.real_robot.safety.workspace import Region

ANGLE = np.radians(3.0)  # rad
NEAR = 0.5  # share of the way by which a joint may be off
STEP = 0.05  # s
STEPS = 20  # of the way
REST = 10  # steps at its end
SEEN = 2e-3  # m: less of the tool's way is not seen
AXES = (("forwards", "backwards"), ("to the left", "to the right"), ("up", "down"))
Poses = Callable[[Floats, int], Floats]
"""Poses [k, 12] (m, rotation matrix) of the tool that joint `at` moves, at joints [k, n]."""
Ask = Callable[[str], bool]  # shows a question, and returns whether a person said yes


def known_folder() -> Path:
    """Where it is remembered what went well with this user's robots."""
    return Path.home() / ".cache" / "embodied" / "robots"


def is_rehearsed(deployment: Deployment) -> bool:
    """Whether the calibration was rehearsed, or there is none that a person made."""
    if deployment.emulator is not None or deployment.dry:
        return True
    found = _hash(deployment)
    file = _file(deployment)
    return not found or (file.exists() and found in file.read_text().split())


def require_rehearsed(deployment: Deployment) -> None:
    """ConfigError where `is_rehearsed` is False."""
    if not is_rehearsed(deployment):
        raise ConfigError(
            f"the calibration of {deployment.robot} is new: first try each joint with `embodied "
            "robot teleop robot=NAME` (or `embodied deploy`) at a terminal, which asks for it"
        )


def remember(deployment: Deployment) -> None:
    file = _file(deployment)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as kept:
        kept.write(f"{_hash(deployment)}\n")


def _file(deployment: Deployment) -> Path:
    return known_folder() / f"{deployment.robot}.rehearsed"


def _hash(deployment: Deployment) -> str:
    said = build(deployment.driver, Driver).calibration()
    return hashlib.sha256(said.encode()).hexdigest() if said else ""


def rehearse(deployment: Deployment, folder: Path, hold: Node | None, ask: Ask) -> None:
    """Try every joint, in a session of its own in the daemon's `folder`. ConfigError where one did
    not move as it was sent, or a person says that it turned the other way."""
    regions = build_regions(deployment)
    names, poses = build(deployment.driver, Driver).joints, tool_poses(deployment.kinematics)
    targets = "embodied.embodiments.joint_position.JointTargets"
    controller = {"_target_": targets, "joints": len(names), "hand": False, "dt": STEP}
    made = replace(
        deployment,
        controller=controller,
        step=STEP,
        policy="",
        served=False,
        recording="",
        cameras={},
        filmed={},
    )
    session = RobotSession(made, folder, hold)
    try:
        for at, name in enumerate(names):
            if name.endswith("gripper"):  # a hand that is a joint (drivers.joined), in m
                continue
            session.wait_until_held(600.0)
            session.update()
            begin = np.array(session.state["sent"])
            target = _target(deployment, regions, begin, at, name)
            before = np.array(session.state["q"])
            session.start()
            reached = _lead(session, begin, target)
            _lead(session, target, begin)
            session.rest()
            _require_moved(names, at, reached - before, target - begin)
            expected = in_words(*poses(np.array([begin, target]), at))
            if not ask(f"{name} turned by 3 degrees and back. Did {expected}?"):
                raise ConfigError(
                    f"{name} turns the other way than its kinematics say: look at sign and zero of "
                    "that joint (robot.driver.joints), or calibrate it again"
                )
    finally:
        session.close()


def tool_poses(kinematics: str) -> Poses:
    """Poses of the tool of the arm that a joint belongs to; without rotation (zeros) where the
    kinematics are a user's function."""
    several = read_arms_file(kinematics)
    if several is None:
        try:
            forward = load_arm(arm_of_kinematics(kinematics)).forward
        except ConfigError:
            own = forward_of(kinematics)
            return lambda q, at: np.concatenate([own(q)[0], np.zeros((len(q), 9))], 1)
        return lambda q, at: _flat(*forward(q)[:2])
    parts, begin = list[tuple[int, Any]](), 0
    for placed in several.arms.values():
        parts.append((begin, placed))
        begin += placed.joints

    def poses(q: Floats, at: int) -> Floats:
        start, placed = next((b, p) for b, p in reversed(parts) if b <= at)
        arm = load_arm(placed.arm)
        place, turn = arm.forward(q[:, start : start + len(arm)])[:2]
        base = np.asarray(placed.rotation)
        return _flat((base @ place[:, :, None])[:, :, 0], base @ turn)

    return poses


def _flat(place: Floats, turn: Floats) -> Floats:
    return np.concatenate([place, turn.reshape(len(place), 9)], 1)


def in_words(before: Floats, after: Floats) -> str:
    """What a person sees of the tool between two poses [12] (m, rotation matrix; base frame)."""
    way = after[:3] - before[:3]
    axis = int(np.argmax(np.abs(way)))
    if abs(way[axis]) >= SEEN:
        said = AXES[axis][int(way[axis] < 0)]
        return f"the tool first move {said} ({1e3 * abs(way[axis]):.0f} mm, seen from the arm)"
    turn = after[3:].reshape(3, 3) @ before[3:].reshape(3, 3).T
    vector = np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]])
    if not vector.any():
        return "it first turn as your kinematics count upwards"
    axis = int(np.argmax(np.abs(vector)))
    said = ("away from the arm", "to its left", "up")[axis]
    clock = "clockwise" if vector[axis] > 0 else "anticlockwise"
    return f"the hand first turn {clock}, for one who looks {said}"


def _target(
    deployment: Deployment, regions: Sequence[Region], begin: Floats, at: int, name: str
) -> Floats:
    """Where the joint is turned to: towards the middle of its limits, or away from it where that
    way is not free. ConfigError where none is."""
    limits = deployment.limits
    way = ANGLE if begin[at] <= (limits.low[at] + limits.high[at]) / 2 else -ANGLE
    depth, what = 0.0, ""
    for target in (begin + turn * np.eye(len(begin))[at] for turn in (way, -way)):
        found = [region.nearest(each) for region in regions for each in (begin, target)]
        depth, what = min(found, default=(1.0, ""))
        if depth > 0:
            return target
    raise ConfigError(
        f"{name} cannot be tried from here, because of {what} ({-1e3 * depth:.0f} mm too near): "
        "move the arm to a free pose first, as its home pose (support it, and switch it off)"
    )


def _lead(session: RobotSession, begin: Floats, target: Floats) -> Floats:
    """Lead the set-point there; the measured joints [n] then. ConfigError where the arm stops."""
    for share in [*np.linspace(0, 1, STEPS), *[1.0] * REST]:
        session.update()
        if session.mode != Mode.RUNNING:
            raise ConfigError(f"the rehearsal ended: {session.fault or 'the arm was stopped'}")
        session.send_action(begin + share * (target - begin), float(session.state["measured"]))
        time.sleep(STEP)
    session.update()
    return np.array(session.state["q"])


def _require_moved(names: tuple[str, ...], at: int, moved: Floats, asked: Floats) -> None:
    off = np.abs(moved - asked)
    worst = int(np.argmax(off))
    if off[worst] > NEAR * abs(asked[at]):
        raise ConfigError(
            f"{names[at]} was sent by {np.degrees(asked[at]):.1f} degrees, and {names[worst]} "
            f"moved by {np.degrees(moved[worst]):.1f}: look at ids and ranges, at what is in its "
            "way, and at the limits (workspace, geometry)"
        )
