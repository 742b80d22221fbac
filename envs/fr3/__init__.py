"""Franka FR3 on a table: scene, tasks, domain randomization; on MuJoCo and MuJoCo Warp."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
