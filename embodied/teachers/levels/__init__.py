"""Teachers of whole levels: domain randomization, PLR, ACCEL, SFL, PAIRED, CLUTR."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
