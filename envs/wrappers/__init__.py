"""Environment wrappers: time limits, delays, noise, partial observation."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
