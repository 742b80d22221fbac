"""Crafter: a batched open-world survival game with 22 achievements."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
