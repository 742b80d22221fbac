"""The UR that is not there, which ships with the package: `robot=ur_fake` needs it."""

from real_robot.counterparts.rtde import FakeUR

__all__ = ["FakeUR"]
