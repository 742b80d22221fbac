"""Quadrotor with batched rigid-body dynamics: hover and go-to environments."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
