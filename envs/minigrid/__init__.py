"""MiniGrid and BabyAI on the Gymnasium or EnvPool backend, with levels and subgoals."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
