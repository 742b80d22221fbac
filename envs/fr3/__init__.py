"""Franka FR3 on a table: scene, tasks, domain randomization, MuJoCo and MuJoCo Warp "
"environments."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
