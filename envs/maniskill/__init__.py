"""ManiSkill 3 tasks, on the CPU or as one batch on a GPU."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
