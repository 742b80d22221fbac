"""Teleoperation: keyboard, gamepad, SpaceMouse, a leader arm."""
