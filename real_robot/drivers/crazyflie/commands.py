"""Set-points and orders for a Crazyflie; each is a call on cflib's Crazyflie object.

`place` [3] (m) and `yaw` (rad) are the target, `rate` [4] is its velocity (m/s, rad/s).
"""

from __future__ import annotations

import math
from typing import Any

from embodied.real_robot.control.arm_state import Floats
from embodied.real_robot.drivers.crazyflie.link import Command


def position(place: list[float], yaw: float) -> Command:
    """A place and a heading."""
    x, y, z = place
    turned = math.degrees(yaw)
    return lambda drone: drone.commander.send_position_setpoint(x, y, z, turned)


def full_state(place: list[float], yaw: float, rate: Floats) -> Command:
    """Set-points that also say how fast they move."""
    speed, turn = [float(each) for each in rate[:3]], math.degrees(float(rate[3]))
    facing = [0.0, 0.0, math.sin(yaw / 2), math.cos(yaw / 2)]
    still = [0.0, 0.0, 0.0]
    return lambda drone: drone.commander.send_full_state_setpoint(
        place, speed, still, facing, 0.0, 0.0, turn
    )


def hover(place: list[float], yaw: float, rate: Floats, here: Floats, gain: float) -> Command:
    """Velocities along its own axes, yaw rate, height; `here` [4] is where it is measured to be,
    and `gain` (1/s) leads it back."""
    x, y = (rate[i] + gain * (place[i] - here[i]) for i in range(2))
    turn = math.degrees(rate[3] + gain * (yaw - here[3]))
    cos, sin = math.cos(here[3]), math.sin(here[3])
    ahead, left = float(cos * x + sin * y), float(cos * y - sin * x)
    return lambda drone: drone.commander.send_hover_setpoint(ahead, left, turn, place[2])


def landing(ground: float, seconds: float, learned: bool) -> Command:
    """Down to `ground` (m), by the planner on board; where a policy on board flew, its own
    controller does from here on."""

    def land(drone: Any) -> None:
        if learned:
            drone.param.set_value("policy.enable", 0)
        drone.commander.send_notify_setpoint_stop()  # from here on its planner may
        drone.high_level_commander.land(ground, seconds, yaw=None)

    return land


def emergency_stop(drone: Any) -> None:
    """Motors off."""
    drone.supervisor.send_emergency_stop()
