"""Cameras: sources, one process each, shared frames, images for policies and rewards."""
