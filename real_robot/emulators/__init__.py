"""Emulated robots, at the level of their wire, for their real drivers."""
