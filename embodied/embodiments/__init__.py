"""Robots as data: kinematics, limits, home pose, and the action spaces that drive them."""
