"""Crafter: an open-world survival game with 22 achievements, batched."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
