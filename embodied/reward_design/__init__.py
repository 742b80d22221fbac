"""Reward design: generates, trains, selects and improves reward programs for a task in words."""
