"""Environment wrappers: time limit, delays, noise, frame stacking, partial observation."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
