"""Utilities of the stand-in."""
