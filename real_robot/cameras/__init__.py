"""Cameras: sources, one process each, shared frames, images for policies and rewards."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
