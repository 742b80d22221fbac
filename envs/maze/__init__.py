"""Mazes as levels: for teachers of levels, with held-out mazes."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
