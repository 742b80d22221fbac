"""Rewards that are written down: weighted sums, shaping, programs, composites."""
