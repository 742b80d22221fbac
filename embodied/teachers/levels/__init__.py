"""Teachers that choose or make whole levels: domain randomization, PLR, ACCEL, PAIRED, CLUTR."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
