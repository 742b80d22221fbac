"""What a Franka's driver needs of the maker's library: its errors as one line that says what to do,
calls with a time limit, and impedance controllers (in C++ at 1 kHz).

A spring on the joints or on the tool gets joint targets, as every stage before it does. On the
tool, the joint target is turned into a tool pose by the arm's own model; the elbow is pulled
towards its initial position by torques that do not move the tool.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar
from xml.etree import ElementTree

import numpy as np

from embodied.embodiments import fr3
from embodied.real_robot.drivers.driver import Tool, damped, tool_springs
from embodied.real_robot.kernel.arm_state import Floats, Limits
from embodied.real_robot.kernel.driver import DriverError, Springs

try:
    franky: Any = import_module("franky")
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "franky-control is not installed; type: pip install 'embodied-rl[robot]'", name="franky"
    ) from error

FAILED = (franky.Exception, RuntimeError)
"""Errors of the library: its own, and those of its network layer."""

ADVICE = {
    "cartesian_reflex": "it touched something: clear the way, then reset",
    "joint_reflex": "it touched something: clear the way, then reset",
    "communication_constraints_violation": "packets came too late: see docs/franka.md on the real-"
    "time kernel and the direct cable, then reset",
    "joint_position_limits_violation": "a joint is at its end: guide it back by hand, then reset",
    "self_collision_avoidance_violation": "it would touch itself: guide it away, then reset",
    "joint_velocity_violation": "a joint was too fast: check the limits, then reset",
    "power_limit_violation": "it needed too much power: lighter or slower, then reset",
    "controller_torque_discontinuity": "torques jumped: lower the stiffness, then reset",
    "tau_j_range_violation": "a torque left its range: lower the stiffness, then reset",
    "Connection to FCI refused": "is it on, unlocked, and FCI activated in Desk?",
    "Timeout": "it does not answer any more: look at its power, cable and Desk, then reset",
    "Incompatible": "its system version and franky-control's libfranka do not fit",
    "real-time": "this kernel is not real-time: install one, or set realtime: false to try it",
    "realtime": "this kernel is not real-time: install one, or set realtime: false to try it",
    "User stopped": "the user stop is pressed: release it, then reset",
}
MODES = {
    "UserStopped": "the user stop is pressed: release it",
    "Guiding": "it is being guided by hand: let go of its buttons",
    "Reflex": "it has stopped itself: clear it in Desk, or press and release the user stop",
    "AutomaticErrorRecovery": "it is recovering from an error: wait until it has",
    "Other": "it is locked or busy: unlock its joints and activate FCI in Desk",
}

PORTS = (1337, 1338)  # of the arm and of its hand

T = TypeVar("T")


def explain(host: str, said: object) -> str:
    """One line about what `said` means for the arm at `host`, and what to look at."""
    text = " ".join(str(said).removeprefix("libfranka: ").split())
    hint = next((advice for word, advice in ADVICE.items() if word in text), "")
    return f"the Franka at {host}: {text}{f' ({hint})' if hint else ''}"


def call(host: str, do: Callable[[], T], patience: float, what: str) -> T:
    """`do()`, which must be done in `patience` s; DriverError where it is not, or fails.

    A peer that takes connections and then says nothing would keep the library waiting for ever:
    such a connection is cut.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(do())
        except FAILED as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience)
    if failed:
        error = failed.pop()  # or it would hold itself, and with it the connection, for ever
        raise DriverError(explain(host, error)) from error
    if not done:
        sever(host)
        raise DriverError(
            f"the Franka at {host} did not {what} within {patience:.0f} s: look at its power, "
            "cable and Desk"
        )
    return done[0]


def sever(host: str) -> None:
    """Cut this process's connections to the arm at `host`, where it no longer answers.

    The library's objects say goodbye when they end, and wait, with all of Python, for an answer.
    """
    address = host
    with suppress(OSError):
        address = socket.gethostbyname(host)
    for entry in os.listdir("/proc/self/fd"):
        # Most are of another kind, and one is gone meanwhile.
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as wire:
            if wire.getpeername() in [(address, port) for port in PORTS]:
                wire.shutdown(socket.SHUT_RDWR)


NEAR_END = 0.03  # rad before a joint's end at which it is pushed back
GUIDED = 0.1  # of its damping: what a released arm keeps
SMOOTHED = 0.02  # s: the time constant with which another stiffness sets in
_UPPER_END = np.array([2.75010, 1.79180, 2.90650, -0.14580, 2.81010, 4.52050, 3.01960])  # rad
_LOWER_END = np.array([-2.75010, -1.79180, -2.90650, -3.04810, -2.81010, 0.54092, -3.01960])  # rad
_K = np.array([12.0, 5.17, 7.0, 8.0, 34.0, 11.0, 34.0])  # rad/s^2
_C = np.array([0.30, 0.20, 0.20, 0.30, 0.35, 0.35, 0.35])  # rad/s
ACCELERATION, JERK = 10.0, 5000.0
"""Limits of every joint, rad/s^2 and rad/s^3."""
SAMPLES = 200
_NAMES = ("lower", "upper", "velocity", "effort")


@dataclass(frozen=True)
class Own:
    """An arm's own limits of 7 joints: positions (rad), speed (rad/s), torque (N m)."""

    low: Floats
    high: Floats
    velocity: Floats
    torque: Floats


def own(urdf: str) -> Own:
    """Limits in the model that the arm itself sends; the narrower where that and the FR3's data
    sheet differ. ValueError where there are not 7 joints."""
    try:
        joints = [j for j in ElementTree.fromstring(urdf) if j.get("type") == "revolute"]
        said = [[float(j.find("limit").get(n)) for n in _NAMES] for j in joints]  # pyright: ignore
    except (ElementTree.ParseError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"the arm's own model cannot be read: {error}") from error
    if len(said) != len(fr3.JOINTS):
        raise ValueError(f"the arm's own model has {len(said)} joints, an FR3 has 7")
    low, high, velocity, torque = np.array(said).T
    return Own(
        np.maximum(low, fr3.LOWER),
        np.minimum(high, fr3.UPPER),
        np.minimum(velocity, fr3.VELOCITY),
        np.minimum(torque, fr3.TORQUE),
    )


def allowed(q: Floats, velocity: Floats) -> tuple[Floats, Floats]:
    """Velocities [..., 7] (rad/s), lowest (negative) and highest, that joints at `q` [..., 7]
    may have. Near its joint ends an FR3 stops a joint that is too fast for the remaining range
    (Franka Robotics, robot limits of the FR3): v(q) = min(v_max, max(0, sqrt(k (end - q)) - c))."""
    up = np.sqrt(np.maximum(0.0, _K * (_UPPER_END - q))) - _C
    down = np.sqrt(np.maximum(0.0, _K * (q - _LOWER_END))) - _C
    return -np.clip(down, 0.0, velocity), np.clip(up, 0.0, velocity)


def misfit(limits: Limits, arm: Own) -> str:
    """Why `limits` ask for more than the arm allows, in one line; empty where they do not."""
    if len(limits) != len(fr3.JOINTS):
        return f"limits are given for {len(limits)} joints, a Franka has 7"
    low, high = np.asarray(limits.low), np.asarray(limits.high)
    over = {
        "low": (arm.low - low, arm.low),
        "high": (high - arm.high, arm.high),
        "velocity": (limits.velocity - arm.velocity, arm.velocity),
        "torque": (limits.torque - arm.torque, arm.torque),
        "acceleration": (np.asarray(limits.acceleration) - ACCELERATION, np.full(7, ACCELERATION)),
        "jerk": (np.asarray(limits.jerk) - JERK, np.full(7, JERK)),
    }
    for name, (excess, most) in over.items():
        worst = int(np.argmax(excess))
        if excess[worst] > 1e-6:
            return f"limits.{name} of joint {worst + 1} is more than the arm's own {most[worst]:g}"
    return _too_fast(limits, arm)


def _too_fast(limits: Limits, arm: Own) -> str:
    """Whether braking to a limit at `acceleration` is ever faster than the arm tolerates there."""
    margin, brake = np.asarray(limits.margin), 2 * np.asarray(limits.acceleration)
    low, high = np.asarray(limits.low) + margin, np.asarray(limits.high) - margin
    q = low + np.linspace(0, 1, SAMPLES)[:, None] * (high - low)
    most = np.asarray(limits.velocity)
    down, up = allowed(q, arm.velocity)
    rising, falling = (np.sqrt(brake * np.maximum(0, left)) for left in (high - q, q - low))
    faster = np.maximum(np.minimum(most, rising) - up, np.minimum(most, falling) + down).max(0)
    worst = int(np.argmax(faster))
    if faster[worst] <= 1e-6:
        return ""
    return (
        f"joint {worst + 1} may arrive at its end {faster[worst]:.2f} rad/s faster than the arm "
        "tolerates there: a larger limits.margin, or less velocity or acceleration"
    )


class JointSpring:
    """Torque = `stiffness` (q_d - q) - `damping` dq, of which the first is at most `push`; [7]."""

    def __init__(self, stiffness: Floats, damping: Floats, push: Floats) -> None:
        self.reach = push / stiffness
        self.springs = Springs("joints", stiffness, damping, self.reach)
        self.wish = np.zeros(7)

    def motion(self, robot: Any, own: Own, q: Floats) -> Any:
        """A controller that holds the arm at q [7]."""
        motion = franky.JointImpedanceTrackingMotion(
            stiffness=self.springs.stiffness,
            damping=self.springs.damping,
            gains_time_constant=SMOOTHED,
            lower_joint_limits=own.low,
            upper_joint_limits=own.high,
            joint_limit_activation_distance=NEAR_END,
        )
        motion.set_reference(franky.JointReference(q=q))
        return motion

    def gains(self, stiffness: Floats) -> Any:
        """Gains for `set_gains`, of another stiffness [7]."""
        return franky.JointImpedanceGains(stiffness, damped(self.springs, stiffness))

    def release(self, motion: Any) -> None:
        """Take the springs off `motion`: a person moves the arm against a little damping."""
        motion.set_gains(franky.JointImpedanceGains(np.zeros(7), GUIDED * self.springs.damping))

    def engage(self, motion: Any, here: Floats) -> None:
        """The springs again, at `here` [7]."""
        motion.set_reference(self.reference(here, here))
        motion.set_gains(self.gains(self.springs.stiffness))

    def reference(self, q: Floats, here: Floats) -> Any:
        """The reference for targets `q` [7], of an arm that is `here` [7]."""
        np.subtract(q, here, out=self.wish)
        np.clip(self.wish, -self.reach, self.reach, out=self.wish)
        self.wish += here
        return franky.JointReference(q=self.wish)


class ToolSpring:
    """Springs on the tool's pose."""

    def __init__(self, config: Tool) -> None:
        self.config = config
        self.springs = tool_springs(config)
        self.model: Any = None
        self.frames: tuple[Any, Any] | None = None

    def motion(self, robot: Any, own: Own, q: Floats) -> Any:
        state, config = robot.state, self.config
        self.model = robot.model
        self.frames = (state.F_T_EE, state.EE_T_K)
        motion = franky.CartesianImpedanceTrackingMotion(
            translational_stiffness=config.stiffness,
            rotational_stiffness=config.turning,
            translational_error_clip=np.full(3, config.force / config.stiffness),
            rotational_error_clip=np.full(3, config.torque / config.turning),
            gains_time_constant=SMOOTHED,
            posture_task=franky.PostureTask(q, config.elbow),
            lower_joint_limits=own.low,
            upper_joint_limits=own.high,
            joint_limit_activation_distance=NEAR_END,
        )
        motion.set_reference(self.reference(q, q))
        return motion

    def gains(self, stiffness: Floats) -> Any:
        return franky.CartesianImpedanceGains.diagonal(stiffness, damped(self.springs, stiffness))

    def release(self, motion: Any) -> None:
        damping = GUIDED * self.springs.damping
        motion.set_gains(franky.CartesianImpedanceGains.diagonal(np.zeros(6), damping))
        motion.set_nullspace_gains(self._elbow(0.0))

    def engage(self, motion: Any, here: Floats) -> None:
        motion.set_reference(self.reference(here, here))
        motion.set_gains(self.gains(self.springs.stiffness))
        motion.set_nullspace_gains(self._elbow(self.config.elbow))

    def _elbow(self, stiffness: float) -> Any:
        gains = franky.NullspaceGains()
        gains.posture_stiffness = np.full(7, stiffness)
        return gains

    def reference(self, q: Floats, here: Floats) -> Any:
        assert self.frames is not None
        return franky.CartesianReference(self.model.pose(franky.Frame.EndEffector, q, *self.frames))
