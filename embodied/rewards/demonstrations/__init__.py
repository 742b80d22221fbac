"""Rewards learned from demonstrations: task progress."""
