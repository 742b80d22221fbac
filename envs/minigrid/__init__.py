"""MiniGrid and BabyAI, by their own package or by EnvPool, with levels and subgoals."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
