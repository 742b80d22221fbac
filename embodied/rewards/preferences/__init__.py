"""Rewards learned from preferences between observations."""
