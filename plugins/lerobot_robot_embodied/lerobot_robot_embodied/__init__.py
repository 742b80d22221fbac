"""A LeRobot robot that is any robot of embodied. LeRobot finds this package by its name."""

from .config_embodied import EmbodiedRobotConfig
from .embodied_robot import EmbodiedRobot

__all__ = ["EmbodiedRobot", "EmbodiedRobotConfig"]
