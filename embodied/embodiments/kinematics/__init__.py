"""Kinematics of any arm, from a table that is read once from an MJCF or URDF file."""
