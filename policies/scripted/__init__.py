"""Scripted demonstrators, one module per environment, and checkpoints as demonstrators."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
