"""Maze environment for unsupervised environment design, with held-out evaluation mazes."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
