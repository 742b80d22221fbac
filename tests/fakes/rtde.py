"""The UR that is not there, which ships with the package: `robot=ur_sim` needs it."""

from embodied.real_robot.emulators.ur.controller import FakeUR

__all__ = ["FakeUR"]
