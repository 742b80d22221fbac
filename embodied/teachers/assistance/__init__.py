"""Privileged assistance that is annealed with success."""
