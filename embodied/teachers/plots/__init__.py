"""Plots of the tasks and levels that a teacher sampled."""
