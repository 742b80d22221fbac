"""Reward functions and models, by where their knowledge comes from."""
