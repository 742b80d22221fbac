"""Safety stages that look at what is measured: external force, speeds, positions.

The other stages and the limits bound what is commanded; an arm may do something else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.chain import Tick
from embodied.real_robot.kernel.driver import DriverError

DIFFERENCE = 1e-6  # rad (m): step of the Jacobian's differences
NEARER = 0.6  # share of the tool's distance from a joint at which something may push as well
LEVER = 0.1  # m: the least distance from a joint's axis at which something pushes
SINGULAR = 1e-4  # m^2: near a singular pose an estimated force grows no more
TOUCHED = 0.5  # share of the force limit from which an arm has touched something
BACK = 0.05  # s before the touch: where a set-point is put that lets go
OVER = 1.25  # share of a speed limit that a measured speed may reach
STRAY = 0.1  # share of limits.tracking by which a joint may be measured outside
TOOL_STRAY = 0.03  # m by which the tool may be measured outside of the workspace
FURTHER = 0.02  # rad, m by which what began outside may go further out
PATIENCE = 5  # ticks in a row: noise and the end of a push stop no arm


class ToolJacobian:
    """The tool's velocity per velocity of each joint [3, n], at joint positions [n], by differences
    of `forward`. The newest is kept, because several stages ask at the same positions."""

    def __init__(self, forward: Callable[[Floats], Floats], joints: int) -> None:
        self.forward = forward
        self._steps = np.concatenate([np.zeros((1, joints)), DIFFERENCE * np.eye(joints)])
        self._q = np.full(joints, np.nan)
        self._newest = np.zeros((3, joints))

    def __call__(self, q: Floats) -> Floats:
        if not np.array_equal(q, self._q):
            places = self.forward(q + self._steps)
            self._newest = (places[1:] - places[0]).T / DIFFERENCE
            self._q = q.copy()
        return self._newest


class Force:
    """An external force on the tool above `most` (N) is a fault that lets go at once: the set-point
    is put to where the arm was `BACK` s before it touched something.

    Where the driver estimates joint torques only, the force is the one at the tool that explains
    them best, J' f = tau_ext, and not less than what pushes a single joint as hard at `NEARER` of
    the tool's distance: the arm may have touched something with its forearm."""

    name: ClassVar[str] = "force"

    def __init__(self, most: float, jacobian: ToolJacobian, dt: float) -> None:
        self.most = most
        self.jacobian = jacobian
        self._before: deque[Floats] = deque(maxlen=1 + round(BACK / dt))
        """Positions measured before something was touched, the oldest first."""

    def begin(self, arm: ArmState) -> None:
        self._before.clear()

    def __call__(self, tick: Tick) -> None:
        if tick.guided:
            self._before.clear()
            return
        newtons = self.newtons(tick.arm)
        if newtons <= TOUCHED * self.most:
            self._before.append(tick.arm.q.copy())
        if not newtons <= self.most:  # also what is not a number
            tick.back = (self._before[0] if self._before else tick.arm.q).copy()
            tick.fail(
                f"something pushes on the tool with {newtons:.0f} N; its limit is {self.most:g}"
            )

    def newtons(self, arm: ArmState) -> float:
        """The estimated force (N); NaN where the driver has no estimate."""
        if arm.force is not None:
            return float(np.linalg.norm(arm.force))
        if arm.external is None:
            return float("nan")
        jacobian = self.jacobian(arm.q)
        square = jacobian @ jacobian.T + SINGULAR * np.eye(3)
        whole = float(np.linalg.norm(np.linalg.solve(square, jacobian @ arm.external)))
        levers = np.maximum(NEARER * np.sqrt((jacobian**2).sum(0)), LEVER)
        return max(whole, float((np.abs(arm.external) / levers).max()))

    def require_measured(self, arm: ArmState) -> None:
        """DriverError where the driver estimates no force."""
        if arm.force is None and arm.external is None:
            raise DriverError(
                f"force={self.most:g} N cannot be kept: this driver measures no external force "
                "(servos need the torque of each joint); say force: unmeasured in the robot's YAML"
            )


class Overspeed:
    """A joint, or the tool, that is measured faster than `OVER` times its limit in `PATIENCE`
    consecutive ticks is a fault."""

    name: ClassVar[str] = "overspeed"

    def __init__(self, limits: Limits, jacobian: ToolJacobian, tool_speed: float) -> None:
        self.most = OVER * np.asarray(limits.velocity)
        self.tool_most = OVER * tool_speed
        self.jacobian = jacobian
        self._ticks = 0

    def begin(self, arm: ArmState) -> None:
        self._ticks = 0

    def __call__(self, tick: Tick) -> None:
        dq = np.abs(tick.arm.dq)
        tool = float(np.linalg.norm(self.jacobian(tick.arm.q) @ tick.arm.dq))
        within = bool((dq <= self.most).all()) and tool <= self.tool_most
        self._ticks = 0 if within or tick.guided else self._ticks + 1
        if self._ticks < PATIENCE:
            return
        if tool > self.tool_most:
            tick.fail(f"the tool moves at {tool:.2f} m/s; at most {self.tool_most:.2f} is allowed")
        joint = int(np.argmax(dq / self.most))
        tick.fail(
            f"joint {joint} moves at {dq[joint]:.2f} rad/s; at most {self.most[joint]:.2f} is "
            "allowed"
        )


class Outside:
    """A joint measured outside of its limits, or the tool outside of its workspace, in `PATIENCE`
    consecutive ticks is a fault. An arm that begins outside may only come in. `workspace` gives the
    tool's depths [k] (m; negative: outside) at positions [k, n]."""

    name: ClassVar[str] = "outside"

    def __init__(self, limits: Limits, workspace: Callable[[Floats], Floats] | None) -> None:
        stray = STRAY * np.asarray(limits.tracking)
        self.low = np.asarray(limits.low) - stray
        self.high = np.asarray(limits.high) + stray
        self.workspace = workspace
        self._allowed: Floats | None = None
        """Distance [n + 1] (rad, m) outside of each joint and the tool that is no fault."""
        self._ticks = 0

    def begin(self, arm: ArmState) -> None:
        self._allowed = None
        self._ticks = 0

    def __call__(self, tick: Tick) -> None:
        q = tick.arm.q
        tool = 0.0 if self.workspace is None else -self.workspace(q[None])[0] - TOOL_STRAY
        out = np.maximum(np.append(np.maximum(self.low - q, q - self.high), tool), 0.0)
        if self._allowed is None or tick.guided:
            self._allowed = out
        over = out - self._allowed - FURTHER * (self._allowed > 0)
        self._allowed = np.minimum(self._allowed, out)
        self._ticks = self._ticks + 1 if (over > 0).any() else 0
        if self._ticks >= PATIENCE:
            at = int(np.argmax(over))
            what = f"joint {at} is measured" if at < len(q) else "the tool is measured"
            tick.fail(f"{what} outside of its {'limits' if at < len(q) else 'workspace'}")
