"""Batched MuJoCo: thread pool, cameras, MuJoCo Warp, and locomotion tasks."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
