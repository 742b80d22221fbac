"""Maze environment for unsupervised environment design, with held-out evaluation mazes."""
