"""Crazyflie telemetry: the log blocks that are requested, and what their bits mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FLIGHT = {
    **{f"stateEstimate.{axis}": "float" for axis in "xyz"},
    "stateEstimate.yaw": "float",
    **{f"stateEstimate.v{axis}": "FP16" for axis in "xyz"},
    "gyro.z": "FP16",
}
"""24 of the 26 bytes of a block."""
HEALTH = {
    "supervisor.info": "uint16_t",
    "pm.vbat": "float",
    **{f"kalman.varP{axis}": "float" for axis in "XYZ"},
}
CAN_ARM, ARMED, CAN_FLY, FLYING, TUMBLED, LOCKED, CRASHED, PLANNING = (
    1 << bit for bit in (0, 1, 3, 4, 5, 6, 7, 8)
)


@dataclass(frozen=True)
class Health:
    """`info`: the supervisor's bits; `volts` of the battery; `variance` of its own estimate of its
    place, of the worst axis (m^2)."""

    info: int
    volts: float
    variance: float

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Health:
        worst = max(values[f"kalman.varP{axis}"] for axis in "XYZ")
        return cls(int(values["supervisor.info"]), values["pm.vbat"], worst)

    @property
    def armed(self) -> bool:
        return bool(self.info & ARMED)

    @property
    def can_fly(self) -> bool:
        return bool(self.info & CAN_FLY)

    @property
    def flying(self) -> bool:
        return bool(self.info & FLYING)

    @property
    def crashed(self) -> bool:
        return bool(self.info & CRASHED)

    @property
    def planning(self) -> bool:
        """Whether the planner on board flies it."""
        return bool(self.info & PLANNING)


def stopped(health: Health) -> str:
    """Why it does not fly until a person acts; empty where it may."""
    if health.info & LOCKED:
        return "it is locked, motors off: look at it, put it on the floor, switch it off and on"
    if health.info & TUMBLED:
        return "it lies on its side or upside down: put it upright, then reset"
    if health.info & CRASHED:
        return "it has crashed: look at its propellers, put it on the floor, then reset"
    return ""


def refusal(health: Health) -> str:
    """Why it was not armed."""
    if reason := stopped(health):
        return reason
    if not health.info & CAN_ARM:
        return "its supervisor says that it cannot be armed: look at its LEDs and its self test"
    return "it says that it can be armed, and does not arm"
