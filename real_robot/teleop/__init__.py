"""Teleoperation: keyboard, gamepad, SpaceMouse, a leader arm."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
