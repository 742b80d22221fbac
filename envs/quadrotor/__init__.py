"""A quadrotor with its own batched dynamics: hover and go-to."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
