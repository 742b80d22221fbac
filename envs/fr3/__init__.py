"""The Franka FR3 on its table: scene, tasks, randomization, MuJoCo and Warp versions."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
