"""A LeRobot policy that is any policy of embodied. LeRobot finds this package by its name."""

from .configuration_embodied import EmbodiedConfig

__all__ = ["EmbodiedConfig"]
