"""Scripted demonstrators, one environment each, and trained checkpoints as demonstrators."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
