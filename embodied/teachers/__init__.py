"""Automatic curricula: teachers choose the task, level or initial state of each episode."""
