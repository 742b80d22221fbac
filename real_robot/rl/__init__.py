"""Reinforcement learning on a robot: the environment, the session, reset-free training."""
