"""The servo bus on a pseudo-terminal, which ships with the package: `robot=so101_sim` needs it."""

from embodied.real_robot.emulators.servos.bus import (
    MAKES,
    OVERLOAD,
    DynamixelServo,
    FakeBus,
    Faults,
    FeetechServo,
    Servo,
)

__all__ = ["MAKES", "OVERLOAD", "DynamixelServo", "FakeBus", "Faults", "FeetechServo", "Servo"]
