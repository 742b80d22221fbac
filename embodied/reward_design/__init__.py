"""Reward design: a sentence becomes reward programs, which are tried, chosen and improved."""
